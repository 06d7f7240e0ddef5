//! Arithmetic on sizes and addresses, checked. A leaf: imports no layer.

/// The largest block, in bytes: what a Rust slice and a pointer difference can express.
pub(crate) const MAX_BYTES: usize = isize::MAX as usize;

/// The size to request from a strategy: zero becomes one (`malloc(0)` must return a block that can be freed). `None` if
/// no object can have the size.
#[inline]
pub(crate) const fn request(size_bytes: usize) -> Option<usize> {
    match size_bytes {
        0 => Some(1),
        n if n > MAX_BYTES => None,
        n => Some(n),
    }
}

/// `count * size_bytes`, the size of a `calloc`; `None` on overflow.
#[inline]
pub(crate) const fn array(count: usize, size_bytes: usize) -> Option<usize> {
    count.checked_mul(size_bytes)
}

/// How many bytes lie between `address` and the next multiple of `align`, a power of two.
#[inline]
pub(crate) const fn padding(address: usize, align: usize) -> usize {
    debug_assert!(align.is_power_of_two());
    address.wrapping_neg() & (align - 1)
}

#[cfg(test)]
mod tests {
    use super::{MAX_BYTES, array, padding, request};

    #[test]
    fn a_request_for_nothing_is_a_request_for_one_byte() {
        assert_eq!(request(0), Some(1));
        assert_eq!(request(7), Some(7));
        assert_eq!(request(MAX_BYTES), Some(MAX_BYTES));
        assert_eq!(request(MAX_BYTES + 1), None);
    }

    #[test]
    fn an_array_that_overflows_is_refused() {
        assert_eq!(array(3, 5), Some(15));
        assert_eq!(array(usize::MAX, 2), None);
    }

    #[test]
    fn padding_leads_to_the_next_multiple() {
        for address in 0..300 {
            let next = address + padding(address, 64);
            assert!(next.is_multiple_of(64) && next - address < 64, "{address} -> {next}");
        }
    }
}
