//! Threads: which of them start with the handler of whoever starts them, and who frees a block that moved.
//!
//! `cargo run --example threads` prints
//! ```text
//! std::thread::spawn         system
//! ctxalloc::thread::spawn    aligned64
//! Context::wrap              aligned64
//! what the child selected    pool
//! what its parent sees       aligned64
//! 4 buffers, made on 4 threads, resized and dropped on a fifth: all of aligned64
//! ```

use ctxalloc::{Buffer, Context, Handler, current, handler, scope, set, thread};
use std::error::Error;
use std::io::{self, Write};
use std::sync::mpsc;

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut io::stdout())
}

fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let aligned = handler("aligned64").ok_or("built in")?;
    let pool = handler("pool").ok_or("built in")?;

    // A thread of the standard library starts with the default, as a plain `threading.Thread` does in Python.
    let plain = scope(aligned, || std::thread::spawn(current));
    let plain = plain.join().map_err(|_| "a panic")?;
    writeln!(out, "std::thread::spawn         {plain}")?;
    assert_eq!(plain, ctxalloc::default_handler());

    // Ours starts with a copy of the context of its creator, taken at the call.
    let ours = scope(aligned, || thread::spawn(current));
    let ours = ours.join().map_err(|_| "a panic")?;
    writeln!(out, "ctxalloc::thread::spawn    {ours}")?;
    assert_eq!(ours, aligned);

    // Any other way to start work elsewhere (a builder, scoped threads, a pool) takes a wrapped closure.
    let work = scope(aligned, || Context::copy_current().wrap(current));
    let wrapped = std::thread::scope(|threads| threads.spawn(work).join()).map_err(|_| "a panic")?;
    writeln!(out, "Context::wrap              {wrapped}")?;
    assert_eq!(wrapped, aligned);

    // A copy: what the child selects stays in the child.
    let (child_sees, parent_sees) = scope(aligned, || -> Result<(Handler, Handler), &str> {
        let child = thread::spawn(move || {
            drop(set(pool)); // without its token the selection lasts until the thread ends
            current()
        });
        Ok((child.join().map_err(|_| "a panic")?, current()))
    })?;
    writeln!(out, "what the child selected    {child_sees}")?;
    writeln!(out, "what its parent sees       {parent_sees}")?;
    assert_eq!((child_sees, parent_sees), (pool, aligned));

    moved_blocks_stay_with_their_handler(aligned, out)
}

/// Four threads make buffers; a fifth, which has selected nothing, resizes and drops them.
fn moved_blocks_stay_with_their_handler(aligned: Handler, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let (sender, receiver) = mpsc::channel();
    let makers: Vec<_> = (0..4_u8)
        .map(|number| {
            let sender = sender.clone();
            scope(aligned, || thread::spawn(move || sender.send(Buffer::copy_from_slice(&[number; 1000]))))
        })
        .collect();
    drop(sender);
    let taker = std::thread::spawn(move || -> Result<Vec<String>, ctxalloc::Error> {
        assert_eq!(current(), ctxalloc::default_handler());
        receiver
            .iter()
            .map(|buffer| {
                let mut buffer = buffer?;
                buffer.resize(100_000)?; // by the handler that made it
                assert!(buffer[..1000].iter().all(|&byte| byte == buffer[0]));
                assert_eq!(buffer.as_ptr().addr() % 64, 0);
                Ok(buffer.handler().name().into_owned())
            })
            .collect()
    });
    for maker in makers {
        maker.join().map_err(|_| "a panic")??;
    }
    let names = taker.join().map_err(|_| "a panic")??;
    assert_eq!(names, ["aligned64"; 4]);
    let count = names.len();
    writeln!(out, "{count} buffers, made on {count} threads, resized and dropped on a fifth: all of {}", names[0])?;
    Ok(())
}

#[cfg(test)]
#[path = "../tests/examples/said.rs"]
mod said;

#[test]
fn it_prints_what_its_first_lines_say() {
    said::check(include_str!("threads.rs"), run);
}
