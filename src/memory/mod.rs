//! Layer 5: owned memory that remembers its handler, so that it goes back where it came from: on any thread,
//! after its scope, whatever is selected by then.
#![allow(unsafe_code, reason = "owners of raw blocks")]

mod buffer;
mod context_alloc;
mod device_buffer;
mod scratch;

pub use buffer::Buffer;
pub use context_alloc::ContextAlloc;
pub use device_buffer::DeviceBuffer;
pub use scratch::Scratch;
