//! All-reduce: every rank's output is the reduction of all inputs.

use std::sync::Arc;
use std::time::Instant;

use crossweft_device::{DataType, ReduceOp};
use crossweft_executor::{Buffers, Options, Prepared, Recorded, Schedule};
use crossweft_hal::{self as hal, Device};

use crate::algorithm::Algorithm;
use crate::communicator::{Communicator, SymmetricBuffer};
use crate::error::CollectiveError;
use crate::selector::{Choice, Selector};

/// Where the caller's buffers will be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Memory {
    /// Anywhere in the process: messages are staged.
    Private,
    /// In symmetric memory, from [`Communicator::allocate`]; both may be the same.
    Symmetric {
        /// What inputs lie in.
        input: SymmetricBuffer,
        /// What outputs lie in.
        output: SymmetricBuffer,
    },
}

/// What an all-reduce is prepared for. The same on every rank, except for the schedule.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AllReduceOptions {
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation.
    pub op: ReduceOp,
    /// Largest message in bytes.
    pub max_bytes: u64,
    /// Where buffers will be.
    pub memory: Memory,
    /// One algorithm for every size; `None` leaves the choice to the selector.
    pub algorithm: Option<Algorithm>,
    /// Thread blocks of each rank; `None` leaves that to the selector.
    pub blocks: Option<u32>,
    /// In which order thread blocks run.
    pub schedule: Schedule,
}

impl AllReduceOptions {
    /// Private buffers, algorithms as the selector chooses.
    #[must_use]
    pub fn new(dtype: DataType, op: ReduceOp, max_bytes: u64) -> Self {
        Self {
            dtype,
            op,
            max_bytes,
            memory: Memory::Private,
            algorithm: None,
            blocks: None,
            schedule: Schedule::default(),
        }
    }

    /// Buffers in symmetric memory.
    #[must_use]
    pub fn symmetric(mut self, input: &SymmetricBuffer, output: &SymmetricBuffer) -> Self {
        self.memory = Memory::Symmetric {
            input: input.clone(),
            output: output.clone(),
        };
        self
    }

    /// Always this algorithm.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// This many thread blocks, run in this order.
    #[must_use]
    pub fn blocks(mut self, blocks: u32, schedule: Schedule) -> Self {
        (self.blocks, self.schedule) = (Some(blocks), schedule);
        self
    }
}

/// An all-reduce that is ready to be called. Calls are local: they wait for the peers' data, but
/// allocate nothing.
#[derive(Debug)]
pub struct AllReduce {
    communicator: Communicator,
    dtype: DataType,
    selector: Selector,
    /// One for each of the selector's choices.
    prepared: Vec<Arc<Prepared>>,
}

impl AllReduce {
    pub(crate) fn prepare(
        communicator: &Communicator,
        options: AllReduceOptions,
    ) -> Result<Self, CollectiveError> {
        let AllReduceOptions {
            dtype,
            op,
            max_bytes,
            memory,
            algorithm,
            blocks,
            schedule,
        } = options;
        let world_size = communicator.world_size();
        let symmetric = matches!(memory, Memory::Symmetric { .. });
        let on_gpu = !matches!(communicator.device(), Device::Cpu);
        let mut selector = match algorithm {
            Some(algorithm) if algorithm.needs_registered() && !symmetric => {
                return Err(CollectiveError::NeedsSymmetric { algorithm });
            }
            Some(algorithm) => Selector::forced(algorithm, max_bytes),
            None if on_gpu => Selector::for_gpus(world_size, symmetric, max_bytes),
            None => Selector::new(world_size, symmetric, max_bytes),
        };
        if let Some(blocks) = blocks {
            selector.with_blocks(blocks);
        }
        let buffers = match &memory {
            Memory::Private => Buffers::Private,
            Memory::Symmetric { input, output } => Buffers::Registered {
                input: input.registered(),
                output: output.registered(),
            },
        };
        let deadline = Instant::now() + communicator.timeout();
        let prepared = selector
            .choices()
            .iter()
            .map(|choice| {
                let plan = choice.algorithm.plan(world_size, choice.blocks)?;
                let mut options = Options::new(dtype, op, choice.piece);
                (options.buffers, options.schedule) = (buffers.clone(), schedule);
                Ok(Prepared::prepare(
                    communicator.endpoint(),
                    &plan,
                    options,
                    deadline,
                )?)
            })
            .collect::<Result<_, CollectiveError>>()?;
        Ok(Self {
            communicator: communicator.clone(),
            dtype,
            selector,
            prepared,
        })
    }

    /// Reduces private buffers of equal length. Blocks until `output` is complete.
    ///
    /// # Errors
    /// [`CollectiveError`]; after anything but [`CollectiveError::Usage`] the output is undefined.
    pub fn run(&self, input: &[u8], output: &mut [u8]) -> Result<(), CollectiveError> {
        if input.len() != output.len() {
            let (input, output) = (input.len(), output.len());
            return Err(self.usage(format!("input has {input} bytes, output {output}")));
        }
        let (prepared, piece) = self.select(input.len() as u64)?;
        for (from, to) in input.chunks(piece).zip(output.chunks_mut(piece)) {
            prepared.run(from, to, self.communicator.timeout())?;
        }
        Ok(())
    }

    /// Reduces `data` into itself. Blocks until it is complete.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_in_place(&self, data: &mut [u8]) -> Result<(), CollectiveError> {
        let (prepared, piece) = self.select(data.len() as u64)?;
        for part in data.chunks_mut(piece) {
            prepared.run_in_place(part, self.communicator.timeout())?;
        }
        Ok(())
    }

    /// Reduces `bytes` bytes in symmetric memory, from `input_offset` of the input to
    /// `output_offset` of the output: the same offsets on every rank, and the same range or ranges
    /// that do not overlap. Blocks until this rank's output is complete and its input was read.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_symmetric(
        &self,
        input_offset: u64,
        output_offset: u64,
        bytes: u64,
    ) -> Result<(), CollectiveError> {
        let (prepared, piece) = self.select(bytes)?;
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(piece as u64);
            let limit = self.communicator.timeout();
            prepared.run_registered(input_offset + done, output_offset + done, part, limit)?;
            done += part;
        }
        Ok(())
    }

    /// Reduces `bytes` bytes of private memory of this rank's device, from an offset of one memory to an
    /// offset of another: the same range or ranges that do not overlap. Blocks until the output is
    /// complete.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_at(
        &self,
        input: (&hal::Memory, u64),
        output: (&hal::Memory, u64),
        bytes: u64,
    ) -> Result<(), CollectiveError> {
        let (prepared, piece) = self.select(bytes)?;
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(piece as u64);
            let (from, to) = ((input.0, input.1 + done), (output.0, output.1 + done));
            prepared.run_at(from, to, part, self.communicator.timeout())?;
            done += part;
        }
        Ok(())
    }

    /// Records `calls` calls of [`run_symmetric`](Self::run_symmetric) into a CUDA graph.
    ///
    /// # Errors
    /// As for [`run_symmetric`](Self::run_symmetric); also if this rank is not on a CUDA device, or the
    /// message takes several pieces.
    pub fn record_symmetric(
        &self,
        input_offset: u64,
        output_offset: u64,
        bytes: u64,
        calls: u32,
    ) -> Result<Recorded, CollectiveError> {
        let (prepared, piece) = self.select(bytes)?;
        if bytes > piece as u64 {
            return Err(self.usage(format!("{bytes} bytes are handled in pieces of {piece}")));
        }
        let limit = self.communicator.timeout();
        Ok(prepared.record_registered((input_offset, output_offset), bytes, calls, limit)?)
    }

    /// What is chosen for a message of `bytes` bytes, and why.
    #[must_use]
    pub fn explain(&self, bytes: u64) -> &Choice {
        &self.selector.choices()[self.selector.select(bytes)]
    }

    /// All choices.
    #[must_use]
    pub fn selector(&self) -> &Selector {
        &self.selector
    }

    /// The prepared plan for a message of `bytes` bytes, and how many bytes of it are handled at a time: for
    /// callers who launch it themselves, piece after piece, as on a CUDA stream.
    ///
    /// # Errors
    /// [`CollectiveError::Usage`] if the size does not fit.
    pub fn select(&self, bytes: u64) -> Result<(&Arc<Prepared>, usize), CollectiveError> {
        let index = self.selector.select(bytes);
        let choice = &self.selector.choices()[index];
        if bytes > choice.up_to {
            let max = choice.up_to;
            return Err(self.usage(format!("{bytes} bytes; it was prepared for up to {max}")));
        }
        // Here, so that no piece of a message is reduced before a bad tail is found.
        if !bytes.is_multiple_of(self.dtype.size() as u64) {
            return Err(self.usage(format!(
                "{bytes} bytes are no whole number of {}",
                self.dtype
            )));
        }
        Ok((&self.prepared[index], (choice.piece as usize).max(1)))
    }

    fn usage(&self, reason: String) -> CollectiveError {
        CollectiveError::Usage {
            rank: self.communicator.rank(),
            reason: format!("all-reduce: {reason}"),
        }
    }
}
