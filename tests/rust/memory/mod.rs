//! Owned memory: it remembers its handler, whatever is selected by the time it is resized or freed.

mod buffer;
#[cfg(feature = "allocator-api2")]
mod containers;
#[cfg(not(miri))]
mod global_scoped;
#[cfg(all(feature = "allocator-api2-02", feature = "allocator-api2"))]
mod other_containers;
#[cfg(feature = "allocator-api2")]
mod scratch;
#[cfg(feature = "allocator-api2")]
mod small;
