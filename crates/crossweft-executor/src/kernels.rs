//! Kernels, loaded each by itself, and compiled by the ranks of a host together.
//!
//! The first time on a machine the driver compiles what is loaded, which takes a second for a plan's executor, and keeps the
//! code on disk for all processes. So each rank of a host compiles a part of what all need, and loads the rest from there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crossweft_channel::Endpoint;
use crossweft_device::DataType;
use crossweft_hal::Device;
use crossweft_hal::cuda::{self, CompileOptions, Context, CudaError, Kernel};
use crossweft_kernels::{Entries, MIN_SM, Module, entries, fused_module, hop_module, plan_module};

use crate::ExecutorError;
use crate::fused::Form;

/// An entry point of a module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    module: &'static Module,
    name: &'static str,
    /// How long it takes to compile, in some unit.
    weight: u32,
}

/// Kernels for this compute capability and newer ones that run plans in one piece wait themselves for what is ahead of them.
const EARLY_SM: u32 = 90;

/// Of a plan's executor, where others have 1 (bf16 by ptxas: 0.94 s, and 0.12 to 0.17).
const EXECUTOR: u32 = 7;

impl Entry {
    pub(crate) fn new(module: &'static Module, name: &'static str) -> Self {
        Self {
            module,
            name,
            weight: 1,
        }
    }

    /// Whether launches of it may begin while what is ahead of them ends; of a kernel that runs plans in one piece.
    pub(crate) fn may_begin_early(&self) -> bool {
        self.module.sm >= EARLY_SM
    }

    /// The kernel, compiled if it must be.
    pub(crate) fn load(&self, context: &Arc<Context>) -> Result<Kernel, CudaError> {
        let options = CompileOptions {
            max_registers: Some(self.module.registers()),
            ..CompileOptions::default()
        };
        // It is one of the module's.
        let text = || self.module.part(self.name).unwrap_or_default();
        cuda::Module::shared_by_name(context, self.name, text, &options)?.kernel(self.name)
    }
}

/// What runs plans on elements of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanKernels {
    pub(crate) entries: Entries,
    plans: &'static Module,
    fused: &'static Module,
    hops: &'static Module,
}

impl PlanKernels {
    pub(crate) fn new(context: &Context, dtype: DataType) -> Result<Self, CudaError> {
        let sm = context.device().sm()?;
        Self::of(dtype, sm).ok_or_else(|| CudaError::Incapable {
            device: context.ordinal(),
            what: "run plans",
            reason: format!(
                "its compute capability is {sm}, kernels for {dtype} need at least {MIN_SM}"
            ),
        })
    }

    /// Those for a compute capability, if there are any.
    fn of(dtype: DataType, sm: u32) -> Option<Self> {
        Some(Self {
            entries: entries(dtype)?,
            plans: plan_module(dtype, sm)?,
            fused: fused_module(dtype, sm)?,
            hops: hop_module(sm)?,
        })
    }

    /// The executor, which runs any plan.
    pub(crate) fn executor(&self) -> Entry {
        Entry {
            weight: EXECUTOR,
            ..Entry::new(self.plans, self.entries.plan)
        }
    }

    /// What runs plans of a form in one piece.
    pub(crate) fn fused(&self, form: Form) -> Entry {
        let (name, is_hop) = form.entry(&self.entries);
        Entry::new(if is_hop { self.hops } else { self.fused }, name)
    }

    /// Everything.
    fn all(&self) -> impl Iterator<Item = Entry> {
        let forms = Form::ALL.into_iter().map(|form| self.fused(form));
        forms.chain([self.executor()])
    }
}

/// Has each rank of a host compile a part of `entries`, which are the same on every rank, for a plan of that name; if one has
/// none, all hear of it. What it returns keeps those of this rank loaded. Collective.
pub(crate) fn compile_together(
    (endpoint, context): (&Endpoint, &Arc<Context>),
    entries: Result<Vec<Entry>, CudaError>,
    plan: &str,
    deadline: Instant,
) -> Result<Vec<Kernel>, ExecutorError> {
    let load = |entries: Vec<Entry>| -> Result<Vec<Kernel>, CudaError> {
        let entries: BTreeMap<&str, Entry> = entries.into_iter().map(|e| (e.name, e)).collect();
        let ranks = (0..endpoint.world_size()).filter(|&rank| endpoint.is_mappable(rank));
        let shares = share_out(entries.into_values().collect(), &ranks.collect::<Vec<_>>());
        let own = shares.iter().filter(|(rank, _)| *rank == endpoint.rank());
        own.map(|(_, entry)| entry.load(context)).collect()
    };
    let loaded = entries.and_then(load).map_err(|error| ExecutorError::Hal {
        plan: plan.to_owned(),
        source: error.into(),
    });
    let what = format!("compiling kernels for plan `{plan}`");
    endpoint.settle(loaded, &what, deadline, |source| ExecutorError::Channel {
        plan: plan.to_owned(),
        source,
    })
}

/// Which of `ranks` compiles what: the longest first, each by the rank that has the least to do.
fn share_out(mut entries: Vec<Entry>, ranks: &[u32]) -> Vec<(u32, Entry)> {
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.weight));
    let mut work: Vec<(u32, u32)> = ranks.iter().map(|&rank| (0, rank)).collect();
    let shares = entries.into_iter().filter_map(|entry| {
        let (least, rank) = work.iter_mut().min()?;
        *least += entry.weight;
        Some((*rank, entry))
    });
    shares.collect()
}

/// Compiles all kernels that plans on elements of some types may need, each rank of a host a part of them, so that preparing
/// does not: faster than one type after another where that was never done on the machine. Nothing on the CPU. Collective.
///
/// # Errors
/// [`ExecutorError`]: ranks ask for different types, one died or was late, or a device cannot run plans.
pub fn compile(
    endpoint: &Endpoint,
    dtypes: &[DataType],
    deadline: Instant,
) -> Result<(), ExecutorError> {
    let names: Vec<String> = dtypes.iter().map(ToString::to_string).collect();
    let names = names.join(", ");
    let plan = format!("any, of {names}");
    let agreed = endpoint.agree(&names, "compiling kernels", deadline);
    agreed.map_err(|source| ExecutorError::Channel {
        plan: plan.clone(),
        source,
    })?;
    let Device::Cuda(context) = endpoint.device() else {
        return Ok(());
    };
    let all = || -> Result<Vec<Entry>, CudaError> {
        let mut all = Vec::new();
        for &dtype in dtypes {
            all.extend(PlanKernels::new(context, dtype)?.all());
        }
        Ok(all)
    };
    compile_together((endpoint, context), all(), &plan, deadline).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_begin_early_waits_for_what_is_ahead_of_it() {
        for sm in [80, 89, 90, 100] {
            for &dtype in &DataType::ALL {
                let kernels = PlanKernels::of(dtype, sm).unwrap();
                for entry in Form::ALL.map(|form| kernels.fused(form)) {
                    let text = entry.module.part(entry.name).unwrap();
                    let waits = text.contains("griddepcontrol.wait");
                    assert_eq!(entry.may_begin_early(), waits, "{} of {sm}", entry.name);
                    assert_eq!(waits, sm >= 90, "{} of {sm}", entry.name);
                }
            }
        }
    }

    #[test]
    fn everything_is_compiled_once_and_no_rank_has_it_all() {
        let kernels = PlanKernels::of(DataType::Bf16, 90).unwrap();
        // Those that move blocks are of another module.
        let of_type = |entry: &Entry| entry.name.contains("bf16");
        let all: BTreeMap<&str, Entry> = kernels
            .all()
            .filter(of_type)
            .map(|entry| (entry.name, entry))
            .collect();
        let all: Vec<Entry> = all.into_values().collect();
        let names = |rank: u32, ranks: &[u32]| -> Vec<&str> {
            let shares = share_out(all.clone(), ranks);
            let own = shares.iter().filter(|(of, _)| *of == rank);
            own.map(|(_, entry)| entry.name).collect()
        };
        assert_eq!(names(0, &[0]).len(), 5);
        assert_eq!(names(4, &[4, 6]), ["crossweft_plan_bf16"]);
        assert_eq!(names(6, &[4, 6]).len(), 4);
        let several: Vec<usize> = (0..8)
            .map(|rank| names(rank, &[0, 1, 2, 3, 4, 5, 6, 7]).len())
            .collect();
        assert_eq!(several.iter().sum::<usize>(), 5);
        assert!(several.iter().all(|&count| count <= 1));
    }
}
