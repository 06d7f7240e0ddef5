//! Pictures on their way in and out: NumPy's bytes copied into a [`Buffer`] of the current handler, and back into a
//! new array.

use ctxalloc::Buffer;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Bytes, row by row, pixel by pixel.
pub struct Picture {
    pub pixels: Buffer,
    pub shape: Vec<usize>,
}

impl Picture {
    pub fn height(&self) -> usize {
        self.shape[0]
    }

    pub fn width(&self) -> usize {
        self.shape[1]
    }

    /// Bytes a pixel: 1 for grey pictures.
    pub fn channels(&self) -> usize {
        self.shape.get(2).copied().unwrap_or(1)
    }
}

/// A copy of an array's bytes in the current handler.
pub fn read(image: &Bound<'_, PyAny>) -> PyResult<Picture> {
    let bytes = PyBuffer::<u8>::get(image)
        .map_err(|error| PyTypeError::new_err(format!("a picture is a uint8 array: {error}")))?;
    let shape = bytes.shape().to_vec();
    if !matches!(shape.len(), 2 | 3) {
        return Err(PyValueError::new_err(format!(
            "a picture is height x width or height x width x channels; this array has {} dimensions",
            shape.len()
        )));
    }
    let mut pixels = Buffer::zeroed(bytes.item_count())?;
    bytes.copy_to_slice(image.py(), &mut pixels)?;
    Ok(Picture { pixels, shape })
}

/// A new array of bytes in the handler selected in Python, not initialised.
pub fn empty<'py>(py: Python<'py>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    py.import("numpy")?.call_method1("empty", (PyTuple::new(py, shape)?, "uint8"))
}

/// To Python a picture is a new array: `future_into_py` makes it in the handler of the future.
impl<'py> IntoPyObject<'py> for Picture {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let array = empty(py, &self.shape)?;
        PyBuffer::<u8>::get(&array)?.copy_from_slice(py, &self.pixels)?;
        Ok(array)
    }
}
