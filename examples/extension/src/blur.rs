//! A box blur in two passes of running sums: its cost does not depend on the radius.

use crate::picture::Picture;
use ctxalloc::{Buffer, Error};

/// The mean of each pixel's neighbours up to `radius` away, itself included; the edge counts for what lies beyond it.
pub fn box_blur(picture: &Picture, radius: usize) -> Result<Picture, Error> {
    let (height, width, channels) = (picture.height(), picture.width(), picture.channels());
    let mut rows = Buffer::zeroed(picture.pixels.len())?;
    for line in 0..height {
        for channel in 0..channels {
            blur_line(&picture.pixels, &mut rows, line * width * channels + channel, width, channels, radius);
        }
    }
    let mut pixels = Buffer::zeroed(picture.pixels.len())?;
    for start in 0..width * channels {
        blur_line(&rows, &mut pixels, start, height, width * channels, radius);
    }
    Ok(Picture { pixels, shape: picture.shape.clone() })
}

/// One line of `length` pixels, `stride` bytes apart.
fn blur_line(from: &[u8], to: &mut [u8], start: usize, length: usize, stride: usize, radius: usize) {
    let Some(last) = length.checked_sub(1) else { return };
    // Beyond one length on either side everything is edge; this keeps sums small and loops short.
    let radius = radius.min(length);
    let at = |index: isize| u64::from(from[start + index.clamp(0, last as isize) as usize * stride]);
    let reach = radius as isize;
    let window = 2 * radius as u64 + 1;
    let mut sum: u64 = (-reach..=reach).map(at).sum();
    for index in 0..length as isize {
        to[start + index as usize * stride] = ((sum + window / 2) / window) as u8;
        sum = sum + at(index + reach + 1) - at(index - reach);
    }
}

#[cfg(test)]
mod tests {
    use super::blur_line;

    #[test]
    fn a_running_sum_agrees_with_the_mean_written_out() {
        let line: Vec<u8> = (0..40_u32).map(|n| (n * n % 251) as u8).collect();
        for radius in [0, 1, 3, 39, 40] {
            let mut blurred = vec![0; line.len()];
            blur_line(&line, &mut blurred, 0, line.len(), 1, radius);
            for (index, &value) in blurred.iter().enumerate() {
                let reach = radius as isize;
                let neighbours = (index as isize - reach)..=(index as isize + reach);
                let sum: u64 = neighbours.map(|at| u64::from(line[at.clamp(0, 39) as usize])).sum();
                let window = 2 * radius as u64 + 1;
                assert_eq!(u64::from(value), (sum + window / 2) / window, "radius {radius}, index {index}");
            }
        }
    }
}
