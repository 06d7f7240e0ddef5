//! Buckets: sixteen for each doubling, evenly on a logarithmic scale, so a bucket ends at most 4.5 % above its values.
//! They are those of Prometheus' native histograms with schema 4, and of OpenTelemetry's with scale 4.
//!
//! Bucket 0 has the zeros. Bucket `1 + i` has the integers above `2^((i-1)/16)` and up to `2^(i/16)`; of small numbers
//! each has a bucket of its own, and the buckets between them stay empty.

/// Buckets for each doubling.
pub(crate) const STEPS: usize = 16;
/// What is above `2^48` has no bucket.
const MAX_POWER: usize = 48;
/// How many there are.
pub(super) const BUCKETS: usize = 2 + STEPS * MAX_POWER;

/// `2^63 * 2^(j/16)`, rounded down; the last one is above every number.
const ENDS: [u64; STEPS + 1] = [
    0x8000_0000_0000_0000,
    0x85aa_c367_cc48_7b14,
    0x8b95_c1e3_ea8b_d6e6,
    0x91c3_d373_ab11_c336,
    0x9837_f051_8db8_a96f,
    0x9ef5_3260_91a1_11ad,
    0xa5fe_d6a9_b151_38ea,
    0xad58_3eea_42a1_4ac6,
    0xb504_f333_f9de_6484,
    0xbd08_a39f_580c_36be,
    0xc567_2a11_5506_dadd,
    0xce24_8c15_1f84_80e3,
    0xd744_fcca_d69d_6af4,
    0xe0cc_deec_2a94_e111,
    0xeac0_c6e7_dd24_392e,
    0xf525_7d15_2486_cc2c,
    u64::MAX,
];

/// The numbers from `2^63` on, in `CELLS` equal parts: of each part, how many [`ENDS`] are below all of it. In a part
/// is at most one of them, for 16 log2(33/32) is less than 1.
const CELLS: usize = 32;
const CELL_BITS: u32 = CELLS.trailing_zeros();
const BELOW: [u8; CELLS] = below();

const fn below() -> [u8; CELLS] {
    let mut below = [0; CELLS];
    let mut cell = 0;
    while cell < CELLS {
        let low = (1 << 63) + ((cell as u64) << (63 - CELL_BITS));
        while ENDS[below[cell] as usize] < low {
            below[cell] += 1;
        }
        cell += 1;
    }
    below
}

/// The bucket of a value, unless that is too large for any.
#[inline]
pub(super) fn bucket_of(value: u64) -> Option<usize> {
    if value == 0 {
        return Some(0);
    }
    let zeros = value.leading_zeros();
    let scaled = value << zeros;
    let cell = (scaled >> (63 - CELL_BITS)) as usize % CELLS;
    let below = usize::from(BELOW[cell]);
    let step = below + usize::from(ENDS[below] < scaled);
    let bucket = 1 + STEPS * (63 - zeros as usize) + step;
    (bucket < BUCKETS).then_some(bucket)
}

/// The largest value of a bucket; of those that have none, `u64::MAX`.
pub(crate) fn end_of(bucket: usize) -> u64 {
    match bucket.checked_sub(1) {
        None => 0,
        Some(_) if bucket >= BUCKETS => u64::MAX,
        Some(number) => ENDS[number % STEPS] >> (63 - number / STEPS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small numbers, and those around each end: where an error would be.
    fn values() -> impl Iterator<Item = u64> {
        let around = (1..BUCKETS).map(end_of).flat_map(|end| end.saturating_sub(2)..=end + 2);
        (0..5000).chain(around).filter(|value| *value <= 1 << MAX_POWER)
    }

    #[test]
    fn a_value_is_in_the_first_bucket_that_ends_at_it_or_above() {
        for value in values() {
            let bucket = bucket_of(value).expect("it is not too large");
            assert!(value <= end_of(bucket), "{value} is above its bucket's end");
            assert!(bucket == 0 || end_of(bucket - 1) < value, "{value} belongs into an earlier bucket");
            assert!(end_of(bucket) as f64 <= value as f64 * 1.0443, "{value}: {} is too far", end_of(bucket));
        }
        for too_large in [(1 << MAX_POWER) + 1, 1 << 63, u64::MAX] {
            assert_eq!(bucket_of(too_large), None);
        }
    }

    #[test]
    fn the_ends_are_sixteenth_roots() {
        for (step, end) in ENDS[..STEPS].iter().enumerate() {
            let exact = 2_f64.powi(63) * 2_f64.powf(step as f64 / STEPS as f64);
            let tolerance = if cfg!(miri) { 1e-14 } else { 1e-15 }; // Miri's powf is a little wrong, on purpose
            assert!((*end as f64 / exact - 1.0).abs() < tolerance, "{step}");
        }
        assert_eq!([0, 1, 17, 33, BUCKETS - 1].map(end_of), [0, 1, 2, 4, 1 << MAX_POWER]);
    }
}
