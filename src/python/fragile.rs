//! CPython's functions that go on after NULL as if nothing were, or lose somebody's work: what they ask for is given
//! beyond a limit.
//!
//! Most are static, and a compiler may leave no frame of those that call them. So each is found by its name or that of
//! a function around it, by what asks for memory while it is at work, or by what stands between Python's loop and a
//! function that it calls. `scripts/refuse_each_block.py` finds them: it refuses each block once of what much of the
//! standard library asks for.

use super::allocating::asking;
use super::eval_loop::with_methods;
use super::found::{Seen, c_function, noting, or_none};
use super::symbol::symbol;
use crate::whole::Python as Loop;
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::ffi::CStr;
use std::sync::PoisonError;

/// The loop, with those of this version. `others`: some that were found already.
pub(super) fn with_fragile(py: Python<'_>, python: Loop, others: &[usize]) -> PyResult<Loop> {
    let mut found = by_name(py)?;
    found.extend(others);
    found.extend(or_none(py, by_doing(py, python))?);
    if py.version_info().minor == 13 {
        found.extend(or_none(py, setting_defaults(py, python))?);
    }
    if py.version_info() >= (3, 12) {
        found.extend(or_none(py, telling_of_events(py, python))?); // where nobody may watch, nobody is told
    }
    found.retain(|&function| function != 0);
    found.sort_unstable();
    found.dedup();
    Ok(python.with_fragile(found))
}

/// Those that have a name, or around which one has.
fn by_name(py: Python<'_>) -> PyResult<Vec<usize>> {
    // An iterator over a dict's items is let go of by the collector, which does not know it yet, if there is no tuple
    // for it. The compiler frees what it has not made yet.
    const NAMES: [&CStr; 4] = [c"PyObject_GetIter", c"_PyAST_Compile", c"Py_CompileStringObject", c"PyRun_StringFlags"];
    // The instruction that makes a function lets go of its code twice in 3.12 and 3.13.
    const MAKING_FUNCTIONS: [&CStr; 2] = [c"PyFunction_New", c"PyFunction_NewWithQualName"];
    let builtins = py.import("builtins")?;
    let mut found: Vec<_> = NAMES.into_iter().filter_map(symbol).map(<*mut _>::addr).collect();
    if matches!(py.version_info().minor, 12 | 13) {
        found.extend(MAKING_FUNCTIONS.into_iter().filter_map(symbol).map(<*mut _>::addr));
    }
    for name in ["compile", "eval", "exec"] {
        found.push(c_function(&builtins.getattr(name)?));
    }
    Ok(found)
}

/// Those that ask for memory in the middle of what they do not survive, by what they do.
fn by_doing(py: Python<'_>, python: Loop) -> PyResult<Vec<usize>> {
    // `others`: what asks for as much, and much else, called in each of the ways that there are. What both call is not
    // meant.
    // `items`: as `PyObject_GetIter`, which a compiler may have made part of what calls it.
    // `trees`: both let go of what they have not set yet.
    // `variables`: CPython 3.13 makes a mapping of them from the frame's object, and does not look whether it has that.
    const CODE: &CStr = c"def others(count):
    made = []
    for n in range(1000, 1000 + count):
        d = {n: empty, 'a': 1}
        made.append((
            iter(empty), reversed([n]), *map(enumerate, [empty] * 4), zip(empty, empty), divmod(n, 3), (n,), (n, n),
            [n], [*d], {n}, {**d}, d.copy(), d.items(), d.keys(), d.popitem(), [n].copy(), [n] * 2, [n] + [n], slice(n),
            list(map(str, range(3))), dict(a=n), dict([(n, n)]), set(d), str(n), repr(n), 'a' + str(n), f'{n}.{n!r}',
            '%s.' % n, '.'.join([str(n), 'a']), str(n).encode(), str(n).split('0'), n * 1.5, n + 1, n ** 9, range(n),
            bytes(9), bytearray(9), sorted([n, 1]), max([n], key=str), tuple(d), frozenset(d), memoryview(b'a'),
            exc_info(), get_count(), frame(), partial(str, n)(), Element('a'), Element('a', a='a'), *map(str, [n]),
            element.items(), element.keys(), element.findall('a'), [_ for _ in empty], dict(mapping), hasattr(n, 'a'),
            getattr(n, 'a', n), str(*[n]), map(str, empty), object(),
        ))
        made[-1:] = map(tuple, [made[-1]])
        made[-1].__add__((n,)).count(*[n])
        [].extend(map(str, [n]))
    return made
def items(count):
    return [(iter(of_dict), reversed(of_dict), iter(of_ordered), reversed(of_ordered)) for _ in range(count)]
def trees(count):
    return [(element.iter(), element.itertext()) for _ in range(count)]
def variables_of_one():
    return locals()
def variables(count):
    return [variables_of_one() for _ in range(count)]";
    const WITHOUT_TREES: &CStr = c"type('Element', (), dict.fromkeys(
        ['__init__', 'items', 'keys', 'findall', 'iter', 'itertext'], lambda *given, **named: None))";
    /// So often, once CPython calls them in its fast way.
    const SOME: usize = 3;
    const BEFORE: usize = 20;
    let names = PyDict::new(py);
    let element = match py.import("_elementtree") {
        Ok(module) => module.getattr("Element")?,
        Err(error) if error.is_instance_of::<PyImportError>(py) => py.eval(WITHOUT_TREES, None, None)?,
        Err(error) => return Err(error),
    };
    let sys = py.import("sys")?;
    names.set_item("empty", PyTuple::empty(py))?;
    names.set_item("of_dict", PyDict::new(py).call_method0("items")?)?;
    let ordered = py.import("collections")?.getattr("OrderedDict")?;
    names.set_item("of_ordered", ordered.call0()?.call_method0("items")?)?;
    names.set_item("element", element.call1(("a",))?)?;
    names.set_item("Element", element)?;
    names.set_item("frame", sys.getattr("_getframe")?)?;
    names.set_item("exc_info", sys.getattr("exc_info")?)?;
    names.set_item("get_count", py.import("gc")?.getattr("get_count")?)?;
    names.set_item("mapping", py.import("types")?.getattr("MappingProxyType")?.call1((PyDict::new(py),))?)?;
    names.set_item("partial", py.import("functools")?.getattr("partial")?)?;
    py.run(CODE, Some(&names), None)?;
    // CPython uses no freed pair again meanwhile: it keeps fewer.
    let _pairs = py.eval(c"[(n, n) for n in range(1000, 4000)]", None, None)?;
    let asked_by = |name: &str, before: usize| {
        let work = names.as_any().get_item(name)?;
        let _kept = work.call1((before,))?;
        asking(py, python, || work.call1((SOME,)).map(drop))
    };
    let mut others = asked_by("others", 0)?; // as it is called at first
    others.extend(asked_by("others", BEFORE)?);
    let mut found = Vec::new();
    for (name, has_it) in [("items", true), ("trees", true), ("variables", py.version_info().minor == 13)] {
        if has_it {
            found.extend(those_without(&asked_by(name, BEFORE)?, &others));
        }
    }
    Ok(found)
}

fn those_without(functions: &[usize], others: &[usize]) -> impl Iterator<Item = usize> {
    functions.iter().copied().filter(|function| !others.contains(function))
}

/// CPython 3.13 counts an item that a dict's table had no memory for, and lets go of what it has not got (mended in
/// 3.13.6): json's keys and `sys.intern` ended the process. The functions that set a default are between the loop and a
/// key's `__hash__` there, and not where it is only looked for.
fn setting_defaults(py: Python<'_>, python: Loop) -> PyResult<Vec<usize>> {
    let (hash, seen) = noting(py, python)?;
    let names = PyDict::new(py);
    names.set_item("key", with_methods(py, ["hash"], &hash)?)?;
    py.run(c"{}.get(key)", Some(&names), None)?;
    py.run(c"{}.setdefault(key)", Some(&names), None)?;
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let [looking, setting] = &**seen else { return Ok(Vec::new()) };
    let public = [c"PyDict_SetDefaultRef", c"PyDict_SetDefault"].into_iter().filter_map(symbol).map(<*mut _>::addr);
    Ok(those_without(setting, looking).chain(public).collect())
}

/// Since 3.12 CPython tells `sys.monitoring` and `sys.settrace` of each line, and of each exception that is handled,
/// before it goes on there, and makes numbers and a frame for that. Where they were refused it left the block before
/// its handler had begun: `finally` and `__exit__` did nothing. Those functions are between the loop and what is told.
fn telling_of_events(py: Python<'_>, python: Loop) -> PyResult<Vec<usize>> {
    /// Of one code object alone: of others' CPython tells only after it has looked at the code of all. An exception
    /// that is handled is told of by the function that tells what is returned.
    const EVENTS: [&str; 5] = ["LINE", "INSTRUCTION", "PY_START", "PY_RETURN", "JUMP"];
    /// The numbers of tools, those first that CPython has no use of its own for.
    const TOOLS: [u8; 6] = [4, 3, 5, 2, 1, 0];
    let monitoring = py.import("sys")?.getattr("monitoring")?;
    let mut free = None;
    for tool in TOOLS {
        if free.is_none() && monitoring.call_method1("get_tool", (tool,))?.is_none() {
            free = Some(tool);
        }
    }
    let Some(tool) = free else { return Ok(Vec::new()) };
    let (called, by_the_loop) = noting(py, python)?;
    let names = PyDict::new(py);
    names.set_item("note", called)?;
    py.run(
        c"def watched():\n    for _ in (1, 2):\n        note()\n        note(1, *())\n    return list(map(note, (1,)))",
        Some(&names),
        None,
    )?;
    py.run(c"watched()", Some(&names), None)?;
    let (told, by_events) = noting(py, python)?;
    let code = py.eval(c"watched.__code__", Some(&names), None)?;
    let events = monitoring.getattr("events")?;
    let tell = |is_told: bool| -> PyResult<()> {
        let mut all = 0;
        for name in EVENTS {
            let event: u32 = events.getattr(name)?.extract()?;
            monitoring.call_method1("register_callback", (tool, event, is_told.then_some(&told)))?;
            all |= event;
        }
        monitoring.call_method1("set_local_events", (tool, &code, if is_told { all } else { 0 }))?;
        Ok(())
    };
    monitoring.call_method1("use_tool_id", (tool, "ctxalloc"))?;
    let ran = tell(true).and_then(|()| py.run(c"watched()", Some(&names), None));
    let ended = tell(false);
    monitoring.call_method1("free_tool_id", (tool,))?;
    ran.and(ended)?;
    let all_of = |seen: Seen| seen.lock().unwrap_or_else(PoisonError::into_inner).concat();
    Ok(those_without(&all_of(by_events), &all_of(by_the_loop)).collect())
}
