//! No two files of `src/` import each other, not even by way of others: a reader can begin with a file that needs no
//! other, and go on from there.
//!
//! A file imports the files that define what its paths name. A re-export (`pub use`) is a signpost: it imports nothing,
//! and a path that goes through it leads to where the item is defined. Tests may import whatever they like.

use crate::layers::{sources, src};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// The path of a module: `["handler", "events"]`.
type Module = Vec<String>;

/// What one file says: where its paths lead, and what it re-exports under which name. All paths are absolute.
#[derive(Debug, Default)]
struct File {
    paths: BTreeSet<Module>,
    reexports: BTreeMap<String, Module>,
}

/// The source without comments, strings and characters: with blanks in place of them.
fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("r#\"") {
            rest.find("\"#").map_or(rest.len(), |end| end + 2)
        } else if first == '"' {
            let mut escaped = false;
            let is_end = |(_, character): &(usize, char)| {
                let ends = *character == '"' && !escaped;
                escaped = *character == '\\' && !escaped;
                ends
            };
            rest.char_indices().skip(1).find(is_end).map_or(rest.len(), |(end, _)| end + 1)
        } else if first == '\'' && rest[1..].starts_with('\\') {
            rest[3..].find('\'').map_or(rest.len(), |end| end + 4)
        } else if first == '\'' && rest.chars().nth(2) == Some('\'') {
            rest.char_indices().nth(3).map_or(rest.len(), |(end, _)| end)
        } else {
            code.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        code.push(' ');
        rest = &rest[length..];
    }
    code
}

/// Where the block that begins before `code` ends: behind its closing brace.
fn end_of_block(code: &str) -> usize {
    let mut depth = 0;
    for (position, character) in code.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => return position + 1,
            '}' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

/// All paths of a group: `a::{b, c::d}` is `a::b` and `a::c::d`. What they are renamed to comes second.
fn expanded(path: &str, into: &mut Vec<(Module, String)>, before: &[String]) {
    let path = path.trim();
    let (head, group) = path.split_once('{').unwrap_or((path, ""));
    let (head, alias) = head.split_once(" as ").unwrap_or((head, ""));
    let mut segments = before.to_vec();
    segments.extend(head.split("::").map(str::trim).filter(|segment| !segment.is_empty()).map(str::to_owned));
    if path.contains('{') {
        let group = &group[..end_of_block(group).saturating_sub(1)];
        let (mut depth, mut start) = (0, 0);
        for (position, character) in group.char_indices().chain([(group.len(), ',')]) {
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    if !group[start..position].trim().is_empty() {
                        expanded(&group[start..position], into, &segments);
                    }
                    start = position + 1;
                }
                _ => {}
            }
        }
    } else {
        if segments.last().is_some_and(|last| last == "self") {
            segments.pop();
        }
        let name =
            if alias.is_empty() { segments.last().cloned().unwrap_or_default() } else { alias.trim().to_owned() };
        into.push((segments, name));
    }
}

/// A path as it is written in `module`, which has these children, as an absolute one; nothing where it leads out of the
/// crate.
fn absolute(path: &[String], module: &[String], children: &BTreeSet<String>) -> Option<Module> {
    let mut base = module.to_vec();
    let mut rest = path;
    match rest.first().map(String::as_str)? {
        "crate" => (base, rest) = (Module::new(), &rest[1..]),
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|segment| segment == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        first if children.contains(first) => {}
        _ => return None,
    }
    base.extend_from_slice(rest);
    Some(base)
}

fn is_in_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// What a file says, whose module is `module`. Also of the modules inside of it.
fn read(code: &str, module: &[String], file: &mut File) {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    // The names of child modules, also of those in files of their own.
    let children: BTreeSet<_> = code
        .match_indices("mod ")
        .filter(|(at, _)| !code[..*at].chars().next_back().is_some_and(is_in_name))
        .map(|(at, found)| code[at + found.len()..].chars().take_while(|&character| is_in_name(character)).collect())
        .collect();
    let mut position = 0;
    let mut statement = 0; // where the current one begins
    while let Some(character) = code[position..].chars().next() {
        let begins_a_name = is_in_name(character) && !code[..position].chars().next_back().is_some_and(is_in_name);
        let head = || words(&code[statement..position]);
        if code[position..].starts_with("use ")
            && begins_a_name
            && head().last().is_none_or(|word| word.starts_with("pub") || word.ends_with([']', ')']))
        {
            let end = position + code[position..].find(';').unwrap_or(code.len() - position);
            let mut all = Vec::new();
            expanded(&code[position + 4..end], &mut all, &[]);
            let is_reexport = code[statement..position].contains("pub");
            for (path, name) in all {
                let Some(path) = absolute(&path, module, &children) else { continue };
                if is_reexport {
                    file.reexports.insert(name, path);
                } else {
                    file.paths.insert(path);
                }
            }
            position = end;
        } else if character == '{' && head().iter().rev().nth(1).is_some_and(|word| word == "mod") {
            let end = position + 1 + end_of_block(&code[position + 1..]);
            if !code[statement..position].contains("cfg(test") && !code[statement..position].contains("cfg(all(test") {
                let mut inner = module.to_vec();
                inner.extend(head().last().cloned());
                let mut inside = File::default();
                read(&code[position + 1..end - 1], &inner, &mut inside);
                file.paths.extend(inside.paths);
                file.paths.extend(inside.reexports.into_values());
            }
            (position, statement) = (end, end);
        } else if begins_a_name {
            let path: String = code[position..].chars().take_while(|&c| is_in_name(c) || c == ':').collect();
            let is_continued = code[..position].ends_with("::") || code[..position].ends_with("pub(in ");
            let segments: Vec<_> = path.split("::").filter(|segment| !segment.is_empty()).map(str::to_owned).collect();
            if path.contains("::")
                && !is_continued
                && let Some(path) = absolute(&segments, module, &children)
            {
                file.paths.insert(path);
            }
            position += path.trim_end_matches(':').len().max(1);
        } else {
            position += character.len_utf8();
            if matches!(character, ';' | '{' | '}') {
                statement = position;
            }
        }
    }
}

/// The module of the file in which the item at `path` is defined.
fn defined_in(path: &[String], files: &BTreeMap<Module, File>) -> Module {
    let mut module = Module::new();
    for (number, segment) in path.iter().enumerate() {
        let mut child = module.clone();
        child.push(segment.clone());
        if files.contains_key(&child) {
            module = child;
        } else if let Some(target) = files[&module].reexports.get(segment).filter(|target| *target != path) {
            let mut target = target.clone();
            target.extend_from_slice(&path[number + 1..]);
            return defined_in(&target, files);
        } else {
            break;
        }
    }
    module
}

/// Sets of modules of which each can be reached from each other.
fn circles(imports: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<BTreeSet<Module>> {
    let reached_from = |start: &Module| {
        let mut reached = BTreeSet::new();
        let mut open = vec![start];
        while let Some(module) = open.pop() {
            open.extend(imports.get(module).into_iter().flatten().filter(|next| reached.insert((*next).clone())));
        }
        reached
    };
    let reached: BTreeMap<_, _> = imports.keys().map(|module| (module, reached_from(module))).collect();
    let circle = |module| reached[module].iter().filter(|other| reached[other].contains(module)).cloned().collect();
    imports.keys().map(circle).filter(|circle: &BTreeSet<_>| !circle.is_empty()).collect()
}

/// Which module imports which, of files given by their module and text.
fn imports(texts: &[(Module, String)]) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut files = BTreeMap::new();
    for (module, text) in texts {
        read(&code_of(text), module, files.entry(module.clone()).or_default());
    }
    let imported = |module: &Module, file: &File| {
        let found: BTreeSet<_> = file.paths.iter().map(|path| defined_in(path, &files)).collect();
        found.into_iter().filter(|other| other != module).collect()
    };
    files.iter().map(|(module, file)| (module.clone(), imported(module, file))).collect()
}

fn shown(module: &Module) -> String {
    module.join("::")
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn no_files_import_each_other_in_a_circle() {
    let mut texts = Vec::new();
    for path in sources(&src()) {
        let inside = path.strip_prefix(src()).expect("a source").with_extension("");
        let mut module: Module = inside.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let name = module.pop().expect("a name");
        if !["lib", "mod"].contains(&name.as_str()) {
            module.push(name.clone());
        }
        if !name.ends_with("tests") {
            texts.push((module, fs::read_to_string(&path).expect("a readable source")));
        }
    }
    let imports = imports(&texts);
    assert!(imports.values().map(BTreeSet::len).sum::<usize>() > 300, "the imports were not found");
    let found = circles(&imports);
    let mut message = String::new();
    for circle in &found {
        for module in circle {
            let others: Vec<_> = imports[module].intersection(circle).map(shown).collect();
            message += &format!("{} imports {}\n", shown(module), others.join(", "));
        }
        message += "\n";
    }
    assert!(found.is_empty(), "files that import each other:\n{message}");
}

fn imports_of(texts: &[(&str, &str)]) -> Vec<String> {
    let module = |path: &str| path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
    let texts: Vec<_> = texts.iter().map(|(path, text)| (module(path), (*text).to_owned())).collect();
    let arrow = |(from, to): (&Module, &BTreeSet<Module>)| {
        to.iter().map(|to| format!("{} > {}", shown(from), shown(to))).collect::<Vec<_>>()
    };
    imports(&texts).iter().flat_map(arrow).collect()
}

#[test]
fn this_test_follows_each_way_to_name_an_item() {
    let one = |text| imports_of(&[("", "mod a;\nmod b;"), ("a", text), ("b", "mod c;\npub use c::C;"), ("b::c", "")]);
    assert_eq!(one("use crate::b::c::C;"), ["a > b::c"]);
    assert_eq!(one("use super::b::C;"), ["a > b::c"], "a re-export leads to the definition");
    assert_eq!(one("use super::b::{self, D};"), ["a > b"]);
    assert_eq!(one("use {super::b::{c::E, D}, std::fmt};"), ["a > b", "a > b::c"]);
    assert_eq!(one("fn f() -> crate::b::c::C { super::b::d() }"), ["a > b", "a > b::c"]);
    assert_eq!(one("#[cfg(feature = \"x\")]\nuse super::b::C as D;"), ["a > b::c"]);
    assert_eq!(one("mod inner {\n    use super::super::b::D;\n}"), ["a > b"]);
    assert_eq!(one("mod inner {\n    use super::D;\n}"), [""; 0], "its own file");
    assert_eq!(
        one("// use crate::b::D;\nconst TEXT: &str = \"crate::b::D {\"; const C: char = '{'; fn f<'a>() {}"),
        [""; 0]
    );
    assert_eq!(one("#[cfg(test)]\nmod tests {\n    use crate::b::D;\n}"), [""; 0]);
    assert_eq!(imports_of(&[("", "pub use a::A;\nmod a;"), ("a", "use crate::A;")]), [""; 0]);
    assert_eq!(imports_of(&[("", "mod a;\nfn f() { a::f() }"), ("a", "")]), [" > a"]);
}

#[test]
fn this_test_finds_circles_and_nothing_else() {
    let found = |texts: &[(&str, &str)]| {
        let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
        let texts: Vec<_> = texts.iter().map(|(path, text)| (module(path), (*text).to_owned())).collect();
        circles(&imports(&[vec![(Module::new(), "mod a; mod b; mod c;".to_owned())], texts].concat())).len()
    };
    assert_eq!(found(&[("a", "use crate::b::B;"), ("b", "use crate::c::C;"), ("c", "")]), 0);
    assert_eq!(found(&[("a", "use crate::b::B;"), ("b", "use crate::c::C;"), ("c", "use crate::a::A;")]), 1);
    assert_eq!(found(&[("a", "use crate::b::B;"), ("b", "use crate::a::A;"), ("c", "use crate::a::A;")]), 1);
}
