//! Pre-multiplied sums: each rank's input times a scalar of its own, before the plan that adds them up.
//!
//! A pass of its own in front of any plan, so plans, and what runs them, know nothing of it: the products are
//! written to memory that takes the input's place. One place would not do in its stead: some plans send the
//! input, others let peers read it, who do not know this rank's scalar.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossweft_channel::{Endpoint, RegisteredMemory};
use crossweft_device::DataType;
use crossweft_device::program::Launch;
use crossweft_device::scale::{HostScaler, element_bits};
use crossweft_hal::cpu::scaler;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, CudaError, Kernel, Module, Shape, Stream,
};
use crossweft_hal::{Device, HalError, Memory};
use crossweft_kernels::{MAX_REGISTERS, MAX_THREADS, Scale, entries, scale_module};
use crossweft_plan::{InPlace, Plan};

use crate::ExecutorError;
use crate::prepared::{Buffers, Options};

/// What a rank's input is multiplied by before a sum: an element of the message's type. Products are rounded to
/// that type, those of integers wrap ([`crossweft_device::scale`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scalar(Source);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Bits(u64),
    Address(u64),
}

impl Scalar {
    /// The element of `dtype` nearest to `value`; `None` if that is an integer type without such a number.
    #[must_use]
    pub fn new(dtype: DataType, value: f64) -> Option<Self> {
        element_bits(dtype, value).map(Self::from_bits)
    }

    /// The element of these bits, which are the low ones.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(Source::Bits(bits))
    }

    /// What lies at an address of the rank's device when a call begins.
    ///
    /// # Safety
    /// For as long as calls are made with it, the address must be valid for an element, aligned to it, and nobody may
    /// write there while a call begins.
    #[must_use]
    pub const unsafe fn at(address: u64) -> Self {
        Self(Source::Address(address))
    }
}

/// A prepared multiplication.
#[derive(Debug)]
pub(crate) struct PreMultiplier {
    scalar: Mutex<Scalar>,
    /// Where the products go; `None` if to where the input was, as the plan only works in place.
    products: Option<Products>,
    scaler: Scaler,
    /// Messages that an input has; 0 if nobody reads this rank's.
    blocks: u64,
    element: u64,
}

#[derive(Debug)]
enum Products {
    Registered(Arc<RegisteredMemory>),
    Private(Memory),
}

#[derive(Debug)]
enum Scaler {
    Cpu(HostScaler),
    /// A kernel, and as many of its blocks as the device holds at a time.
    Cuda(Kernel, u32),
}

impl Scaler {
    fn new(device: &Device, dtype: DataType) -> Result<Self, HalError> {
        match device {
            Device::Cuda(context) => {
                let kernel = kernel(context, dtype)?;
                // Asking loads it, too, which could wait for kernels that wait for this rank later.
                let blocks = kernel.max_resident_blocks(MAX_THREADS, 0)?;
                Ok(Self::Cuda(kernel, blocks.max(1)))
            }
            _ => Ok(Self::Cpu(scaler(dtype))),
        }
    }
}

fn kernel(context: &Arc<Context>, dtype: DataType) -> Result<Kernel, CudaError> {
    let sm = context.device().sm()?;
    let (Some(module), Some(entries)) = (scale_module(sm), entries(dtype)) else {
        return Err(CudaError::Incapable {
            device: context.ordinal(),
            what: "multiply inputs",
            reason: format!("there is no kernel for {dtype} and compute capability {sm}"),
        });
    };
    let options = CompileOptions {
        max_registers: Some(MAX_REGISTERS),
        ..CompileOptions::default()
    };
    Module::shared(context, module.name, module.ptx, &options)?.kernel(entries.scale)
}

/// Bytes that a thread handles at a time.
const PIECE: u64 = 16;

impl PreMultiplier {
    /// What `options` ask for, if they do. Collective. `is_used` says whether anybody reads this rank's input.
    pub(crate) fn prepare(
        endpoint: &Arc<Endpoint>,
        plan: &Plan,
        options: &Options,
        is_used: bool,
        deadline: Instant,
    ) -> Result<Option<Self>, ExecutorError> {
        let Some(scalar) = options.pre_multiply else {
            return Ok(None);
        };
        let what = format!("preparing the products of plan `{}`", plan.name);
        let channel = |source| ExecutorError::Channel {
            plan: plan.name.clone(),
            source,
        };
        let hal = |source| ExecutorError::Hal {
            plan: plan.name.clone(),
            source,
        };
        let bytes = options.max_bytes.checked_mul(plan.input_blocks.into());
        let bytes = bytes.ok_or_else(|| ExecutorError::Scratch {
            plan: plan.name.clone(),
            bytes: options.max_bytes,
        })?;
        // Memory of no bytes cannot be shared.
        let bytes = bytes.max(1);
        let device = endpoint.device();
        let products = match &options.buffers {
            _ if plan.in_place == InPlace::Required => None,
            Buffers::Registered { .. } => {
                let memory = endpoint.allocate_registered(bytes, &what, deadline);
                Some(Products::Registered(memory.map_err(channel)?))
            }
            Buffers::Private => {
                let memory = device.allocate(bytes).map_err(hal);
                let memory = endpoint.settle(memory, &what, deadline, channel)?;
                Some(Products::Private(memory))
            }
        };
        let scaler = Scaler::new(device, options.dtype).map_err(hal);
        Ok(Some(Self {
            scalar: Mutex::new(scalar),
            products,
            scaler: endpoint.settle(scaler, &what, deadline, channel)?,
            blocks: if is_used { plan.input_blocks.into() } else { 0 },
            element: options.dtype.size() as u64,
        }))
    }

    /// What peers find where they would find the input; `None` if that is the input itself, or private.
    pub(crate) fn registered(&self) -> Option<&Arc<RegisteredMemory>> {
        match &self.products {
            Some(Products::Registered(memory)) => Some(memory),
            _ => None,
        }
    }

    /// The scalar of calls from now on.
    pub(crate) fn set(&self, scalar: Scalar) {
        *self.scalar.lock().unwrap_or_else(PoisonError::into_inner) = scalar;
    }

    fn scalar(&self) -> Scalar {
        *self.scalar.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The launch with the products for its input.
    fn of_products(&self, launch: &Launch) -> Launch {
        let input = match &self.products {
            None => return *launch,
            Some(Products::Registered(memory)) => memory.local().addr(),
            Some(Products::Private(memory)) => memory.addr(),
        };
        Launch {
            input,
            input_offset: 0,
            ..*launch
        }
    }

    /// Multiplies the input of a launch on the host; returns the launch that is left to be done.
    ///
    /// # Safety
    /// The launch must be valid for this process, and of a size that was prepared for; no other may use the products.
    pub(crate) unsafe fn multiply(&self, launch: &Launch) -> Launch {
        let products = self.of_products(launch);
        let Scaler::Cpu(scaler) = &self.scaler else {
            return products;
        };
        let elements = (launch.bytes * self.blocks / self.element) as usize;
        let scalar = self.scalar();
        let address = match &scalar.0 {
            Source::Bits(bits) => (&raw const *bits).expose_provenance() as u64,
            Source::Address(address) => *address,
        };
        if elements > 0 {
            // SAFETY: the caller's promise, and that of whoever made the scalar. The bits begin with the low
            // byte on every machine that there are leaves for.
            unsafe { scaler.scale(products.input, launch.input, elements, address) };
        }
        products
    }

    /// Multiplies the input of a launch on a CUDA device, in the order of `stream`, which may be recording a graph;
    /// returns the launch that is left to be done there.
    ///
    /// # Safety
    /// The launch must be valid for the device, and of a size that was prepared for; this must be kept, and launches
    /// must follow one another, as for the plan's own.
    pub(crate) unsafe fn multiply_on(
        &self,
        stream: &Stream,
        launch: &Launch,
    ) -> Result<Launch, CudaError> {
        let products = self.of_products(launch);
        let bytes = launch.bytes * self.blocks;
        let Scaler::Cuda(kernel, most) = &self.scaler else {
            return Ok(products);
        };
        if bytes == 0 {
            return Ok(products);
        }
        let (scalar, value) = match self.scalar().0 {
            Source::Bits(bits) => (0, bits),
            Source::Address(address) => (address, 0),
        };
        let parameter = Scale {
            dst: products.input,
            src: launch.input,
            bytes,
            scalar,
            value,
        };
        let of_block = PIECE * u64::from(MAX_THREADS);
        let blocks = bytes.div_ceil(of_block).min((*most).into()) as u32;
        let shape = Shape::linear(blocks, MAX_THREADS);
        // SAFETY: this is the kernel's parameter; the rest is the caller's promise, and that of whoever made the
        // scalar.
        unsafe { kernel.launch(stream, &shape, &[Argument::from(&parameter)])? };
        Ok(products)
    }
}
