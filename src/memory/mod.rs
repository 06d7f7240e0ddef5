//! Layer 5: owned memory that remembers its handler. It goes back to that handler on any thread, after its scope, and
//! whatever is selected by then.
#![allow(unsafe_code, reason = "owners of raw blocks")]

mod allocator;
mod block;
mod buffer;
mod context_alloc;
mod device_buffer;
mod global_scoped;
mod scratch;

pub(crate) use block::Block;
pub use buffer::Buffer;
pub use context_alloc::ContextAlloc;
pub use device_buffer::DeviceBuffer;
pub use global_scoped::GlobalScoped;
pub use scratch::Scratch;
