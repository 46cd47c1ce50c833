//! Modules: PTX, compiled by the driver, and the kernels in them.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError};

use super::context::Context;
use super::driver::{Driver, Version};
use super::error::CudaError;
use super::stream::Stream;
use super::sys::{self, CuFunction, CuModule, DeviceAttribute, FunctionAttribute, jit};

/// How PTX is compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileOptions {
    /// 0 to 4; 4 is the driver's own default.
    pub optimization: u32,
    /// Registers of a thread at most, where the PTX does not say.
    pub max_registers: Option<u32>,
    /// Whether profilers can map instructions to source lines.
    pub line_info: bool,
}

impl Default for CompileOptions {
    fn default() -> Self {
        Self {
            optimization: 4,
            max_registers: None,
            line_info: false,
        }
    }
}

/// A module that [`Module::shared`] has loaded.
#[derive(Debug)]
pub(super) struct Loaded {
    /// Its text, or its name.
    key: &'static str,
    options: CompileOptions,
    raw: CuModule,
}

impl Loaded {
    /// Unloads all of a context that goes.
    pub(super) fn unload_all(context: &mut Context) {
        let modules = context.modules.get_mut();
        let modules = std::mem::take(modules.unwrap_or_else(PoisonError::into_inner));
        for module in modules {
            context.release("a module", |driver| {
                // SAFETY: loaded once; its kernels, which hold the context, are gone.
                unsafe { driver.cuModuleUnload(module.raw) }
            });
        }
    }
}

/// A module, loaded. One that is not [shared](Self::shared) is unloaded with the last of its kernels, which waits for kernels
/// that run, whosever they are.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    raw: CuModule,
    name: String,
    /// Whether the context unloads it.
    is_shared: bool,
}

impl Module {
    /// Loads PTX, compiled by the driver. `name` is for messages. Blocks: 10 ms to seconds where it has to
    /// be compiled, a millisecond or so where the driver has it in its own cache on disk.
    ///
    /// Compiled as a whole: by way of the driver's linker, which would give the code to keep, functions
    /// are compiled apart from the kernels that call them, and those took 3 us longer for each launch.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's words, [`CudaError::OutOfMemory`],
    /// [`CudaError::Call`].
    pub fn load(
        context: &Arc<Context>,
        name: &str,
        ptx: &str,
        options: &CompileOptions,
    ) -> Result<Arc<Self>, CudaError> {
        let raw = Self::compile(context, name, ptx, options)?;
        Ok(Self::of(context, name, raw, false))
    }

    fn compile(
        context: &Context,
        name: &str,
        ptx: &str,
        options: &CompileOptions,
    ) -> Result<CuModule, CudaError> {
        let invalid = |what: &'static str, log: String| CudaError::Compile {
            module: name.to_owned(),
            device: context.ordinal(),
            name: what,
            log,
        };
        let text = CString::new(ptx).map_err(|error| invalid("not text", error.to_string()))?;
        let mut errors = vec![0_u8; LOG_BYTES];
        // Numbers are passed as if they were pointers.
        let number = |value: usize| std::ptr::without_provenance_mut::<c_void>(value);
        let mut settings = vec![
            (jit::ERROR_LOG, errors.as_mut_ptr().cast()),
            (jit::ERROR_LOG_BYTES, number(LOG_BYTES)),
            (jit::OPTIMIZATION, number(options.optimization as usize)),
        ];
        if let Some(registers) = options.max_registers {
            settings.push((jit::MAX_REGISTERS, number(registers as usize)));
        }
        if options.line_info {
            settings.push((jit::LINE_INFO, number(1)));
        }
        let (mut names, mut values): (Vec<c_int>, Vec<*mut c_void>) = settings.into_iter().unzip();
        let mut raw = CuModule::NULL;
        let loaded = context.run(|driver| {
            // SAFETY: a valid place for the answer; the text ends with a null; as many names as values;
            // the log outlives the call.
            unsafe {
                driver.cuModuleLoadDataEx(
                    &raw mut raw,
                    text.as_ptr().cast(),
                    names.len() as c_uint,
                    names.as_mut_ptr(),
                    values.as_mut_ptr(),
                )
            }
        });
        let log = log_text(&errors);
        loaded.map_err(|error| match error {
            CudaError::Call {
                code,
                name: what,
                advice,
                ..
            } if !log.is_empty() || is_about_code(code) => invalid(
                what,
                match log {
                    log if log.is_empty() => advice.to_owned(),
                    log => log,
                },
            ),
            other => other,
        })?;
        Ok(raw)
    }

    /// [`load`](Self::load), once for all who ask for the same text with the same options. It stays loaded for as long as
    /// the context: unloading waits for kernels, which may wait for whatever the last who has it does next.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn shared(
        context: &Arc<Context>,
        name: &str,
        ptx: &'static str,
        options: &CompileOptions,
    ) -> Result<Arc<Self>, CudaError> {
        Self::shared_as((context, name), ptx, options, || {
            Self::compile(context, name, ptx, options)
        })
    }

    /// The same for a text that is made where it is needed: one for each name.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn shared_by_name(
        context: &Arc<Context>,
        name: &'static str,
        text: impl FnOnce() -> String,
        options: &CompileOptions,
    ) -> Result<Arc<Self>, CudaError> {
        Self::shared_as((context, name), name, options, || {
            Self::compile(context, name, &text(), options)
        })
    }

    fn shared_as(
        (context, name): (&Arc<Context>, &str),
        key: &'static str,
        options: &CompileOptions,
        load: impl FnOnce() -> Result<CuModule, CudaError>,
    ) -> Result<Arc<Self>, CudaError> {
        // Held while it is loaded, so that it is loaded once.
        let mut modules = context
            .modules
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let same = |loaded: &&Loaded| loaded.key == key && loaded.options == *options;
        let raw = match modules.iter().find(same) {
            Some(loaded) => loaded.raw,
            None => {
                let (raw, options) = (load()?, options.clone());
                modules.push(Loaded { key, options, raw });
                raw
            }
        };
        Ok(Self::of(context, name, raw, true))
    }

    fn of(context: &Arc<Context>, name: &str, raw: CuModule, is_shared: bool) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            raw,
            name: name.to_owned(),
            is_shared,
        })
    }

    /// Loads what was compiled elsewhere, by `nvcc -cubin` or `ptxas` for this very architecture. `name` is
    /// for messages.
    ///
    /// # Errors
    /// [`CudaError::Call`] if it is no code for this device, [`CudaError::OutOfMemory`].
    ///
    /// # Safety
    /// The bytes must be a whole cubin: the driver believes the sizes in it.
    pub unsafe fn load_cubin(
        context: &Arc<Context>,
        name: &str,
        cubin: &[u8],
    ) -> Result<Arc<Self>, CudaError> {
        let mut raw = CuModule::NULL;
        context.run(|driver| {
            // SAFETY: a valid place for the answer; the caller vouches for the image, which is copied.
            unsafe { driver.cuModuleLoadData(&raw mut raw, cubin.as_ptr().cast()) }
        })?;
        Ok(Self::of(context, name, raw, false))
    }

    /// A kernel of it, on the device and ready: launching it loads nothing, which with the
    /// driver's lazy loading would otherwise wait for running kernels to end.
    ///
    /// # Errors
    /// [`CudaError::UnknownKernel`], [`CudaError::Call`], [`CudaError::OutOfMemory`].
    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Kernel, CudaError> {
        let unknown = || CudaError::UnknownKernel {
            module: self.name.clone(),
            kernel: name.to_owned(),
        };
        let symbol = CString::new(name).map_err(|_| unknown())?;
        let mut function = CuFunction::NULL;
        let attributes = self.context.run(|driver| {
            // SAFETY: a valid place for the answer, a string, and the module lives.
            let found =
                unsafe { driver.cuModuleGetFunction(&raw mut function, self.raw, symbol.as_ptr()) };
            found.map_err(|error| match error.is_code(sys::NOT_FOUND) {
                true => unknown(),
                false => error,
            })?;
            touch(driver, function)?;
            Attributes::of(driver, function)
        })?;
        let (driver, device) = (self.context.driver(), self.context.device());
        Ok(Kernel {
            module: Arc::clone(self),
            function,
            name: name.to_owned(),
            attributes,
            is_early: driver.version() >= EARLY_SINCE && device.sm()? >= EARLY_FROM,
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.is_shared {
            return;
        }
        self.context.release("a module", |driver| {
            // SAFETY: ours, and loaded once; its kernels, which hold this, are gone.
            unsafe { driver.cuModuleUnload(self.raw) }
        });
    }
}

/// Room for what the compiler has to say.
const LOG_BYTES: usize = 16 << 10;

/// The driver that has early launches, in graphs as well.
const EARLY_SINCE: Version = Version {
    major: 12,
    minor: 3,
};
/// The compute capability that has them; kernels for older ones have no instruction to wait by.
const EARLY_FROM: u32 = 90;

/// Whether an error speaks of what was to be compiled, or of the compiler.
fn is_about_code(code: u32) -> bool {
    matches!(code, 200 | 209 | 218 | 221..=223)
}

fn log_text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

/// Puts a function on the device now. Since CUDA 12.4 there is a call for that; with older drivers
/// asking for the number of registers, which only a loaded function has, does it.
fn touch(driver: &Driver, function: CuFunction) -> Result<(), CudaError> {
    // SAFETY: the function's module lives.
    let loaded = unsafe { driver.cuFuncLoad(function) };
    if Driver::is_missing(&loaded) {
        return Attributes::one(driver, function, FunctionAttribute::Registers).map(drop);
    }
    loaded
}

/// What a kernel takes of a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory that the kernel itself declares, a block.
    pub shared_bytes: u32,
    /// Bytes of local memory of a thread: spills, and arrays indexed at run time.
    pub local_bytes: u32,
    /// Threads that a block may have.
    pub max_threads: u32,
}

impl Attributes {
    fn of(driver: &Driver, function: CuFunction) -> Result<Self, CudaError> {
        let one = |attribute| Self::one(driver, function, attribute);
        Ok(Self {
            registers: one(FunctionAttribute::Registers)?,
            shared_bytes: one(FunctionAttribute::SharedBytes)?,
            local_bytes: one(FunctionAttribute::LocalBytes)?,
            max_threads: one(FunctionAttribute::MaxThreads)?,
        })
    }

    fn one(
        driver: &Driver,
        function: CuFunction,
        attribute: FunctionAttribute,
    ) -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: a valid place for the answer; the function's module lives.
        unsafe { driver.cuFuncGetAttribute(&raw mut value, attribute, function)? };
        Ok(u32::try_from(value).unwrap_or(0))
    }
}

/// The size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of shared memory of a block, beside what the kernel declares.
    pub shared_bytes: u32,
}

impl Shape {
    /// `blocks` blocks of `threads` threads, in a row.
    #[must_use]
    pub fn linear(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
        }
    }

    /// The same with so many bytes of shared memory a block.
    #[must_use]
    pub fn with_shared_bytes(self, shared_bytes: u32) -> Self {
        Self {
            shared_bytes,
            ..self
        }
    }
}

/// An argument of a launch, by reference; the value is copied during the launch. Structures are
/// `repr(C)`, memory is its address as `u64`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Argument<'a> {
    value: *mut c_void,
    lifetime: PhantomData<&'a ()>,
}

impl<'a, T: Copy> From<&'a T> for Argument<'a> {
    fn from(value: &'a T) -> Self {
        Self {
            value: std::ptr::from_ref(value).cast_mut().cast(),
            lifetime: PhantomData,
        }
    }
}

/// A kernel, ready on its device.
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Arc<Module>,
    function: CuFunction,
    name: String,
    attributes: Attributes,
    /// Whether driver and device have early launches.
    is_early: bool,
}

/// Threads of a warp.
const WARP: u32 = 32;

impl Kernel {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it takes of a multiprocessor.
    #[must_use]
    pub fn attributes(&self) -> Attributes {
        self.attributes
    }

    /// The context that it is loaded in.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.module.context
    }

    /// Bytes of each of its parameters, in order, to compare with what will be passed. `None` if
    /// the driver cannot tell (before CUDA 12.4).
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn parameter_bytes(&self) -> Result<Option<Vec<u64>>, CudaError> {
        self.context().run(|driver| {
            let mut parameters = Vec::new();
            loop {
                let (mut offset, mut bytes) = (0, 0);
                // SAFETY: valid places for the answers; the module lives.
                let asked = unsafe {
                    driver.cuFuncGetParamInfo(
                        self.function,
                        parameters.len(),
                        &raw mut offset,
                        &raw mut bytes,
                    )
                };
                match asked {
                    Ok(()) => parameters.push(bytes as u64),
                    // What lies beyond the last parameter.
                    Err(error) if error.is_code(sys::INVALID_VALUE) => return Ok(Some(parameters)),
                    Err(CudaError::Unsupported { .. }) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
        })
    }

    /// Lets launches ask for up to so many bytes of shared memory a block; more than 48 KiB have
    /// to be announced. Part of preparing.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the device has less.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), CudaError> {
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        self.context().run(|driver| {
            let attribute = FunctionAttribute::MaxDynamicSharedBytes;
            // SAFETY: the module lives.
            unsafe { driver.cuFuncSetAttribute(self.function, attribute, value) }
        })
    }

    /// Blocks of `threads` threads, with `shared_bytes` bytes of shared memory each, that one
    /// multiprocessor holds at a time; 0 if not even one.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn max_active_blocks(&self, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let count = c_int::try_from(threads).unwrap_or(c_int::MAX);
        let mut blocks = 0;
        self.context().run(|driver| {
            // SAFETY: a valid place for the answer; the module lives.
            unsafe {
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &raw mut blocks,
                    self.function,
                    count,
                    shared_bytes as usize,
                )
            }
        })?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// As many such blocks as the whole device holds at a time, if nothing else runs on it. A grid
    /// whose blocks wait for each other must not have more.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn max_resident_blocks(&self, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let device = self.context().device();
        let multiprocessors = device.attribute(DeviceAttribute::Multiprocessors)?;
        let each = self.max_active_blocks(threads, shared_bytes)?;
        Ok(each.saturating_mul(multiprocessors))
    }

    /// How many threads, at most `most`, blocks of any of `kernels` can have so that `needed` of them are resident at once;
    /// or else, as an inner error, how many are at most. Halves the threads, in whole warps, until they fit.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn resident_threads(
        kernels: &[&Self],
        most: u32,
        needed: u64,
    ) -> Result<Result<u32, u32>, CudaError> {
        let (mut threads, mut fits) = (most, 0);
        loop {
            let mut resident = u32::MAX;
            for kernel in kernels {
                resident = resident.min(kernel.max_resident_blocks(threads, 0)?);
            }
            fits = resident.max(fits);
            if u64::from(fits) >= needed {
                return Ok(Ok(threads));
            }
            if threads <= WARP {
                return Ok(Err(fits));
            }
            threads = (threads / 2).max(WARP) / WARP * WARP;
        }
    }

    /// Launches it in `stream`'s order. Does not block, unless the stream's queue is full.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the shape is impossible; [`CudaError::ContextLost`] if an earlier
    /// kernel broke the context.
    ///
    /// # Safety
    /// The arguments must be as many, and of such types, as the kernel takes
    /// ([`parameter_bytes`](Self::parameter_bytes) helps to check). Until it has ended, addresses
    /// among them must be valid, nobody else may use that memory in ways that the kernel does not
    /// allow for, and this, or a clone of it, must be kept.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        shape: &Shape,
        arguments: &[Argument<'_>],
    ) -> Result<(), CudaError> {
        let Shape {
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared_bytes,
        } = *shape;
        self.context().run(|driver| {
            // SAFETY: module and stream live; the driver only reads the list of arguments, which
            // are pointers to values; the caller vouches for the values.
            unsafe {
                driver.cuLaunchKernel(
                    self.function,
                    gx,
                    gy,
                    gz,
                    bx,
                    by,
                    bz,
                    shared_bytes,
                    stream.handle(),
                    list(arguments),
                    std::ptr::null_mut(),
                )
            }
        })
    }

    /// As [`launch`](Self::launch), but the kernel may begin when the one ahead of it in the stream allows that or is ending,
    /// and not only once it has ended (programmatic dependent launch): it must itself wait for that before it touches
    /// memory that others use. Where the driver or the device has no such launches, it begins as any other.
    ///
    /// # Errors
    /// As for [`launch`](Self::launch).
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    pub unsafe fn launch_early(
        &self,
        stream: &Stream,
        shape: &Shape,
        arguments: &[Argument<'_>],
    ) -> Result<(), CudaError> {
        if !self.is_early {
            // SAFETY: the caller's promise.
            return unsafe { self.launch(stream, shape, arguments) };
        }
        let mut value = [0; 16];
        value[0] = 1;
        let early = sys::LaunchAttribute {
            id: sys::PROGRAMMATIC_STREAM_SERIALIZATION,
            padding: 0,
            value,
        };
        let config = sys::LaunchConfig {
            grid: shape.grid,
            block: shape.block,
            shared_bytes: shape.shared_bytes,
            stream: stream.handle(),
            attributes: &raw const early,
            count: 1,
        };
        self.context().run(|driver| {
            let (parameters, none) = (list(arguments), std::ptr::null_mut());
            // SAFETY: as in `launch`; the configuration and its attribute live.
            unsafe { driver.cuLaunchKernelEx(&raw const config, self.function, parameters, none) }
        })
    }

    /// As [`launch`](Self::launch), and guarantees that all blocks are resident at once, or refuses.
    ///
    /// # Errors
    /// As for [`launch`](Self::launch); also [`CudaError::Call`] if not all blocks can be resident.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    pub unsafe fn launch_cooperative(
        &self,
        stream: &Stream,
        shape: &Shape,
        arguments: &[Argument<'_>],
    ) -> Result<(), CudaError> {
        let Shape {
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared_bytes,
        } = *shape;
        self.context().run(|driver| {
            // SAFETY: as in `launch`.
            unsafe {
                driver.cuLaunchCooperativeKernel(
                    self.function,
                    gx,
                    gy,
                    gz,
                    bx,
                    by,
                    bz,
                    shared_bytes,
                    stream.handle(),
                    list(arguments),
                )
            }
        })
    }
}

/// A list of arguments as the driver takes it: an [`Argument`] is a pointer to a value.
fn list(arguments: &[Argument<'_>]) -> *mut *mut c_void {
    arguments.as_ptr().cast_mut().cast()
}
