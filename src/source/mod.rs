//! Layer 1: where bytes come from. One file a source; each is the only place that speaks to its system.
//!
//! A source hands out raw bytes and knows nothing of names, scopes or strategies. Mapped pages, SYCL queues
//! and device drivers stand beside the C heap here.

pub mod heap;
