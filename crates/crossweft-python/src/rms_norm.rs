//! All-reduces with RMS normalisation: what a call's tensors are to the collective layer.

use crossweft_collective::{
    AllReduceRmsNorm, CollectiveError, DataType, Quantised, RmsNormCall, RmsNormOptions, Scales,
};
use pyo3::prelude::*;

use crate::error::Exception;
use crate::tensor::{Place, Tensor};

/// What one is prepared for, apart from the number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    dtype: DataType,
    hidden: usize,
    epsilon_bits: u32,
}

impl Key {
    pub(crate) fn options(self, max_tokens: usize) -> RmsNormOptions {
        let mut options = RmsNormOptions::new(self.dtype, self.hidden, max_tokens);
        options.epsilon = f32::from_bits(self.epsilon_bits);
        options
    }
}

/// Where the scales of quantised tokens are.
enum Scale {
    Static(f32),
    PerToken(Tensor),
    PerGroup(Tensor),
}

/// The tensors of a call. Those that are written overlap no other.
pub(crate) struct Operands {
    input: Tensor,
    weight: Tensor,
    output: Tensor,
    residual: Option<Tensor>,
    quantised: Option<(Tensor, Scale)>,
}

/// A host tensor of `dtype`.
fn tensor(object: &Bound<'_, PyAny>, what: &str, dtype: Option<DataType>) -> PyResult<Tensor> {
    // Few libraries have a type for it, so bytes will do.
    let as_f8 = dtype.filter(|&dtype| dtype == DataType::F8E4M3);
    let tensor = Tensor::new(object, what, as_f8, None)?;
    if tensor.place != Place::Host {
        return Err(Exception::tensor(format!(
            "the {what} is on {}; all-reduces with normalisation are of host memory, so copy it there",
            tensor.place
        )));
    }
    match dtype {
        Some(dtype) if dtype != tensor.dtype => Err(Exception::tensor(format!(
            "the {what} has elements of {}, not {dtype}",
            tensor.dtype
        ))),
        _ => Ok(tensor),
    }
}

fn written(object: &Bound<'_, PyAny>, what: &str, dtype: DataType) -> PyResult<Tensor> {
    tensor(object, what, Some(dtype))?.writable(what)
}

impl Operands {
    /// Input, weight and output.
    pub(crate) fn new(
        input: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let input = tensor(input, "input", None)?;
        let dtype = input.dtype;
        Ok(Self {
            input,
            weight: tensor(weight, "weight", Some(dtype))?,
            output: written(output, "output", dtype)?,
            residual: None,
            quantised: None,
        })
    }

    pub(crate) fn residual(mut self, residual: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let residual = residual.map(|residual| written(residual, "residual", self.input.dtype));
        self.residual = residual.transpose()?;
        Ok(self)
    }

    /// Quantised values, and their scale: a number, or a tensor with one `per` token or group.
    pub(crate) fn quantised(
        mut self,
        values: Option<&Bound<'_, PyAny>>,
        scale: Option<&Bound<'_, PyAny>>,
        per: &str,
    ) -> PyResult<Self> {
        let (values, scale) = match (values, scale) {
            (None, None) => return Ok(self),
            (Some(values), Some(scale)) => (values, scale),
            _ => {
                return Err(Exception::usage(
                    "quantised and scale belong together: give both or none",
                ));
            }
        };
        let values = written(values, "quantised output", DataType::F8E4M3)?;
        // Tensors of one element have numbers as well.
        let number = match scale.hasattr("__dlpack__")? {
            true => None,
            false => scale.extract::<f32>().ok(),
        };
        let scale = match (number, per) {
            (Some(number), _) => Scale::Static(number),
            (None, "token") => Scale::PerToken(written(scale, "scale", DataType::F32)?),
            (None, "group") => Scale::PerGroup(written(scale, "scale", DataType::F32)?),
            (None, per) => {
                return Err(Exception::usage(format!(
                    "there are no scales per `{per}`; give \"token\" or \"group\""
                )));
            }
        };
        self.quantised = Some((values, scale));
        Ok(self)
    }

    /// Fails if one that is written shares bytes with another one.
    pub(crate) fn apart(self) -> PyResult<Self> {
        let scale = self.quantised.as_ref().and_then(|(_, scale)| match scale {
            Scale::Static(_) => None,
            Scale::PerToken(tensor) | Scale::PerGroup(tensor) => Some(tensor),
        });
        let all = [
            ("output", Some(&self.output)),
            ("residual", self.residual.as_ref()),
            (
                "quantised output",
                self.quantised.as_ref().map(|(values, _)| values),
            ),
            ("scale", scale),
            ("input", Some(&self.input)),
            ("weight", Some(&self.weight)),
        ];
        let all = all.map(|(what, tensor)| tensor.map(|tensor| (what, tensor)));
        let all: Vec<_> = all.into_iter().flatten().collect();
        for (index, (what, tensor)) in all.iter().enumerate() {
            for (other, with) in &all[index + 1..] {
                let is_read_only = (*what, *other) == ("input", "weight");
                if tensor.overlaps(with) && !is_read_only {
                    return Err(Exception::tensor(format!("{what} and {other} overlap")));
                }
            }
        }
        Ok(self)
    }

    /// What the call must have been prepared for, and its number of tokens.
    pub(crate) fn key(&self, epsilon: f32) -> (Key, usize) {
        let size = self.input.dtype.size() as u64;
        let key = Key {
            dtype: self.input.dtype,
            hidden: (self.weight.bytes / size) as usize,
            epsilon_bits: epsilon.to_bits(),
        };
        let tokens = self.input.bytes / self.weight.bytes.max(1);
        (key, tokens as usize)
    }

    pub(crate) fn run(&mut self, prepared: &AllReduceRmsNorm) -> Result<(), CollectiveError> {
        let residual = self.residual.as_mut();
        let quantised = self.quantised.as_mut().map(|(values, scale)| Quantised {
            // SAFETY: nobody else uses it until the call has ended; it overlaps none of the others.
            values: unsafe { values.write() },
            scales: match scale {
                Scale::Static(scale) => Scales::Static(*scale),
                // SAFETY: as above.
                Scale::PerToken(scales) => Scales::PerToken(unsafe { scales.write_f32() }),
                // SAFETY: as above.
                Scale::PerGroup(scales) => Scales::PerGroup(unsafe { scales.write_f32() }),
            },
        });
        prepared.run(RmsNormCall {
            // SAFETY: nobody writes it until the call has ended.
            input: unsafe { self.input.read() },
            // SAFETY: nobody else uses it until the call has ended; it overlaps none of the others.
            residual: residual.map(|residual| unsafe { residual.write() }),
            // SAFETY: nobody writes it until the call has ended.
            weight: unsafe { self.weight.read() },
            // SAFETY: nobody else uses it until the call has ended; it overlaps none of the others.
            output: unsafe { self.output.write() },
            quantised,
        })
    }
}
