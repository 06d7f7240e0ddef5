//! Compiles the C files of `src/whole` where the feature `whole` is on and the system has what it takes
//! (`cfg(ctxalloc_whole)`). The module of the package contains the library, and writes it to a file when somebody asks for it.

const SOURCES: [&str; 4] = ["src/whole/preload.c", "src/whole/first.c", "src/whole/arrow.c", "src/whole/mappings.c"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
    }
    #[cfg(feature = "whole")]
    compile();
}

#[cfg(feature = "whole")]
fn compile() {
    use std::env::var;
    let of = |name: &str| var(name).unwrap_or_default();
    if of("CARGO_CFG_TARGET_OS") != "linux" || of("CARGO_CFG_TARGET_ENV") != "gnu" {
        return;
    }
    let library = std::path::Path::new(&of("OUT_DIR")).join("libctxalloc_whole.so");
    let tool = cc::Build::new().opt_level(2).pic(true).cargo_metadata(false).get_compiler();
    let mut command = tool.to_command();
    command.args(["-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-o"]).arg(library);
    command.args(SOURCES).arg("-ldl");
    let status = command.status();
    assert!(
        status.as_ref().is_ok_and(std::process::ExitStatus::success),
        "{SOURCES:?} were not compiled ({status:?}, {command:?}): the feature `whole` needs a C compiler; install \
         one, or set CC"
    );
    println!("cargo::rustc-cfg=ctxalloc_whole");
}
