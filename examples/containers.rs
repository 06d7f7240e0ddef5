//! Containers: a `Vec`, a `Box` and a `Buffer` take the handler that is current when they are made, and stay with it.
//!
//! `cargo run --example containers` prints
//! ```text
//! Vec of 1000 squares     aligned64, at a multiple of 64: true
//! Box of an aligned type  pool, at a multiple of 256: true
//! Buffer of 100000 bytes  pool
//! a Vec made outside      system
//! ```

use allocator_api2::boxed::Box as BoxIn;
use allocator_api2::vec::Vec as VecIn;
use ctxalloc::{Buffer, ContextAlloc, handler, scope};
use std::error::Error;
use std::io::{self, Write};

/// A larger alignment than any handler here promises: `ContextAlloc` provides it.
#[repr(align(256))]
struct Tile([f32; 64]);

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut io::stdout())
}

fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let aligned = handler("aligned64").ok_or("built in")?;
    let pool = handler("pool").ok_or("built in")?;

    // `ContextAlloc::new()` looks once; the container grows in the same handler after the scope is over.
    let mut squares: VecIn<u64, ContextAlloc> = scope(aligned, || VecIn::new_in(ContextAlloc::new()));
    squares.extend((0..1000).map(|n| n * n));
    let at_64 = squares.as_ptr().addr().is_multiple_of(64);
    writeln!(
        out,
        "Vec of {} squares     {}, at a multiple of 64: {at_64}",
        squares.len(),
        squares.allocator().handler()
    )?;
    assert!(at_64 && squares.allocator().handler() == aligned);

    // A handler can also be named directly, without any scope.
    let tile = BoxIn::new_in(Tile([1.5; 64]), ContextAlloc::with_handler(pool));
    let at_256 = std::ptr::from_ref(&*tile).addr().is_multiple_of(256);
    writeln!(out, "Box of an aligned type  {}, at a multiple of 256: {at_256}", BoxIn::allocator(&tile).handler())?;
    assert!(at_256 && tile.0.iter().all(|&value| value == 1.5));

    // For sizes that come from outside: failure is an `Error` with the numbers, not a panic or an abort.
    let mut bytes = scope(pool, || Buffer::copy_from_slice(b"header"))?;
    bytes.resize(100_000)?;
    writeln!(out, "Buffer of {} bytes  {}", bytes.len(), bytes.handler())?;
    assert!(bytes.starts_with(b"header\0") && bytes.handler() == pool);
    let refused = bytes.resize(usize::MAX).expect_err("nobody has that much");
    assert!(refused.to_string().starts_with("handler 'pool' could not allocate 18446744073709551615 bytes"));
    assert_eq!(bytes.len(), 100_000, "a refusal changes nothing");

    let outside: VecIn<u8, ContextAlloc> = VecIn::new_in(ContextAlloc::new());
    writeln!(out, "a Vec made outside      {}", outside.allocator().handler())?;
    Ok(())
}

#[cfg(test)]
#[path = "../tests/examples/said.rs"]
mod said;

#[test]
fn it_prints_what_its_first_lines_say() {
    said::check(include_str!("containers.rs"), run);
}
