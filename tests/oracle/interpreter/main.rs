//! The Rust side of the oracle: reads programs from stdin, one a line, and answers one line each with their traces.
//!
//! Each program runs on every kind of runtime that the arguments name (current, multi, local; all without any). The
//! traces come in that order, with blanks between. To the line `migrations` it answers how often tasks suspended
//! themselves on the multi_thread runtime since the last such question, and came back on another worker.
//! tests/oracle/README.md describes programs and traces, and tests/oracle/run.py compares the traces with CPython's.

mod hold;
mod line;
mod program;
mod run;
mod start;
mod stream;
mod suspend;
mod trace;
mod words;

use program::Program;
use run::{Mode, Runtimes};
use std::io::{BufRead, Write, stdin, stdout};
use std::process::ExitCode;

fn main() -> ExitCode {
    match answer_all() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("oracle: {error}");
            ExitCode::FAILURE
        }
    }
}

fn answer_all() -> Result<(), String> {
    let mut modes = std::env::args().skip(1).map(|name| mode(&name)).collect::<Result<Vec<_>, _>>()?;
    if modes.is_empty() {
        modes = vec![Mode::Current, Mode::Multi, Mode::Local];
    }
    let runtimes = Runtimes::new().map_err(|error| format!("no runtime: {error}"))?;
    let mut answers = stdout().lock();
    for (number, text) in stdin().lock().lines().enumerate() {
        let text = text.map_err(|error| format!("stdin ended badly: {error}"))?;
        if text == "migrations" {
            let (suspended, migrated) = suspend::take_migrations();
            answer(&mut answers, &format!("{suspended} {migrated}"))?;
            continue;
        }
        let mut traces = Vec::new();
        for &mode in &modes {
            let program = Program::read(&text).map_err(|error| format!("line {}: {error}", number + 1))?;
            traces.push(runtimes.run(program, mode, number as u64));
        }
        answer(&mut answers, &traces.join(" "))?;
    }
    Ok(())
}

fn answer(to: &mut impl Write, line: &str) -> Result<(), String> {
    writeln!(to, "{line}").and_then(|()| to.flush()).map_err(|error| format!("stdout is closed: {error}"))
}

fn mode(name: &str) -> Result<Mode, String> {
    match name {
        "current" => Ok(Mode::Current),
        "multi" => Ok(Mode::Multi),
        "local" => Ok(Mode::Local),
        _ => Err(format!("{name:?} is no kind of runtime; there are current, multi and local")),
    }
}
