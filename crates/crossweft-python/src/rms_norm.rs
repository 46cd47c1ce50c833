//! All-reduces with RMS normalisation: what a call's tensors are to the collective layer.

use std::time::Duration;

use crossweft_collective::{
    AllReduceRmsNorm, CollectiveError, DataType, GROUP, Quantised, RmsNormCall, RmsNormOptions,
    Scales,
};
use crossweft_executor::{NormBuffers, NormScales};
use crossweft_hal::cuda;
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
    stream: Option<u64>,
}

/// A tensor of `dtype`, to be used on a stream.
fn tensor(
    object: &Bound<'_, PyAny>,
    what: &str,
    dtype: Option<DataType>,
    stream: Option<u64>,
) -> PyResult<Tensor> {
    // Few libraries have a type for it, so bytes will do.
    let as_f8 = dtype.filter(|&dtype| dtype == DataType::F8E4M3);
    let tensor = Tensor::new(object, what, as_f8, stream)?;
    match dtype {
        Some(dtype) if dtype != tensor.dtype => Err(Exception::tensor(format!(
            "the {what} has elements of {}, not {dtype}",
            tensor.dtype
        ))),
        _ => Ok(tensor),
    }
}

impl Operands {
    /// Input, weight and output.
    pub(crate) fn new(
        input: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        let input = tensor(input, "input", None, stream)?;
        let dtype = Some(input.dtype);
        Ok(Self {
            weight: tensor(weight, "weight", dtype, stream)?,
            output: tensor(output, "output", dtype, stream)?.writable("output")?,
            residual: None,
            quantised: None,
            stream: stream.or(input.stream),
            input,
        })
    }

    fn written(&self, object: &Bound<'_, PyAny>, what: &str, dtype: DataType) -> PyResult<Tensor> {
        tensor(object, what, Some(dtype), self.stream)?.writable(what)
    }

    pub(crate) fn residual(mut self, residual: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let residual =
            residual.map(|residual| self.written(residual, "residual", self.input.dtype));
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
        let values = self.written(values, "quantised output", DataType::F8E4M3)?;
        // Tensors of one element have numbers as well.
        let number = match scale.hasattr("__dlpack__")? {
            true => None,
            false => scale.extract::<f32>().ok(),
        };
        let scale = match (number, per) {
            (Some(number), _) => Scale::Static(number),
            (None, "token") => Scale::PerToken(self.written(scale, "scale", DataType::F32)?),
            (None, "group") => Scale::PerGroup(self.written(scale, "scale", DataType::F32)?),
            (None, per) => {
                return Err(Exception::usage(format!(
                    "there are no scales per `{per}`; give \"token\" or \"group\""
                )));
            }
        };
        self.quantised = Some((values, scale));
        Ok(self)
    }

    /// All of them, by name; those that are written first.
    fn all(&self) -> Vec<(&'static str, &Tensor)> {
        let scale = self.quantised.as_ref().and_then(|(_, scale)| match scale {
            Scale::Static(_) => None,
            Scale::PerToken(tensor) | Scale::PerGroup(tensor) => Some(tensor),
        });
        let values = self.quantised.as_ref().map(|(values, _)| values);
        let all = [
            ("output", Some(&self.output)),
            ("residual", self.residual.as_ref()),
            ("quantised output", values),
            ("scale", scale),
            ("input", Some(&self.input)),
            ("weight", Some(&self.weight)),
        ];
        let all = all.map(|(what, tensor)| tensor.map(|tensor| (what, tensor)));
        all.into_iter().flatten().collect()
    }

    /// Fails if one that is written shares bytes with another one, or they are not all in one place.
    pub(crate) fn apart(self) -> PyResult<Self> {
        let all = self.all();
        for (index, (what, tensor)) in all.iter().enumerate() {
            if tensor.place != self.input.place {
                return Err(Exception::tensor(format!(
                    "the input is on {}, the {what} on {}",
                    self.input.place, tensor.place
                )));
            }
            for (other, with) in &all[index + 1..] {
                let is_read_only = (*what, *other) == ("input", "weight");
                if tensor.overlaps(with) && !is_read_only {
                    return Err(Exception::tensor(format!("{what} and {other} overlap")));
                }
            }
        }
        drop(all);
        Ok(self)
    }

    /// Where all are.
    pub(crate) fn place(&self) -> Place {
        self.input.place
    }

    /// The CUDA stream that they are used on.
    pub(crate) fn stream(&self) -> u64 {
        self.stream.unwrap_or(0)
    }

    /// Fails unless all have as many bytes as the tokens need.
    fn fit(&self, hidden: usize, tokens: usize) -> PyResult<()> {
        let token = self.weight.bytes;
        let bytes = tokens as u64 * token;
        let elements = (tokens * hidden) as u64;
        let of_scales = 4 * match &self.quantised {
            Some((_, Scale::PerGroup(_))) => tokens * hidden.div_ceil(GROUP),
            _ => tokens,
        } as u64;
        for (what, tensor) in self.all() {
            let expected = match what {
                "quantised output" => elements,
                "scale" => of_scales,
                "weight" => token,
                _ => bytes,
            };
            if tensor.bytes != expected {
                return Err(Exception::tensor(format!(
                    "the {what} has {} bytes, not {expected}, for {tokens} tokens of {hidden} {}",
                    tensor.bytes, self.input.dtype
                )));
            }
        }
        Ok(())
    }

    /// What the call must have been prepared for, and its number of tokens.
    pub(crate) fn key(&self, epsilon: f32) -> (Key, usize) {
        let size = self.input.dtype.size() as u64;
        let key = Key {
            dtype: self.input.dtype,
            hidden: (self.weight.bytes / size) as usize,
            epsilon_bits: epsilon.to_bits(),
        };
        (key, self.tokens())
    }

    pub(crate) fn tokens(&self) -> usize {
        (self.input.bytes / self.weight.bytes.max(1)) as usize
    }

    /// The addresses of device memory; fails unless the tensors fit together.
    pub(crate) fn addresses(&self, prepared: &AllReduceRmsNorm) -> PyResult<NormBuffers<u64>> {
        self.fit(prepared.options().hidden, self.tokens())?;
        Ok(NormBuffers {
            input: self.input.address,
            residual: self.residual.as_ref().map(|residual| residual.address),
            weight: self.weight.address,
            output: self.output.address,
            quantised: self.quantised.as_ref().map(|(values, scale)| {
                let scale = match scale {
                    Scale::Static(scale) => NormScales::Static(*scale),
                    Scale::PerToken(scales) => NormScales::PerToken(scales.address),
                    Scale::PerGroup(scales) => NormScales::PerGroup(scales.address),
                };
                (values.address, scale)
            }),
        })
    }

    /// Runs the call on host tensors.
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

/// Launches a call on so many tokens at those [addresses](Operands::addresses), in the order of a stream.
pub(crate) fn launch(
    prepared: &AllReduceRmsNorm,
    (buffers, tokens): (&NormBuffers<u64>, usize),
    stream: &cuda::Stream,
    limit: Duration,
) -> Result<(), CollectiveError> {
    let (norm, behind) = prepared.on_cuda(tokens)?;
    // SAFETY: device memory of the tensors, contiguous, of these sizes, checked not to overlap; libraries keep what is used
    // on their streams, and what is prepared is kept by the communicator. The stream orders it.
    unsafe { norm.launch_on_cuda(stream, behind, buffers, tokens as u32, limit) }?;
    Ok(())
}
