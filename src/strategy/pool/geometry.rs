//! How a pool cuts the address space.

/// The size of a region, in bytes.
pub(super) const REGION: usize = 4 << 20;
/// The size of a region's page, in bytes. Not the system's page size.
pub(super) const PAGE: usize = 64 << 10;
/// Pages in a region.
pub(super) const PAGES: usize = REGION / PAGE;
