//! The algorithms that may be chosen: the built-in ones, and plans of the user's registered beside them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crossweft_plan::check::{self, Diagnostic};
use crossweft_plan::{Plan, PlanError, json, mscclpp};

use crate::algorithm::Algorithm;
use crate::candidate::{Candidate, Refusal, Request, UserPlan};

/// The variable that names plan files, and folders of them, as `PATH` does.
pub const PLANS_VARIABLE: &str = "CROSSWEFT_PLANS";

/// Why a plan is not registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The file, or folder, cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no plan, or an unsound one.
    #[error("{origin}: {source}")]
    Plan {
        /// Where the plan came from.
        origin: String,
        /// What is wrong with it.
        source: PlanError,
    },
    /// The checker refuses it.
    #[error(
        "{origin}: plan `{plan}` is refused by the checker: {first}{}; `crossweft plan check` lists all",
        others(*faults)
    )]
    Refused {
        /// Where the plan came from.
        origin: String,
        /// The plan's name.
        plan: String,
        /// The first fault.
        first: Box<Diagnostic>,
        /// How many were found.
        faults: usize,
    },
    /// No call of a communicator computes what it does.
    #[error(
        "{origin}: plan `{plan}` computes `{collective}`, which is not called by name, so it cannot be \
         chosen; prepare it itself instead"
    )]
    Collective {
        /// Where the plan came from.
        origin: String,
        /// The plan's name.
        plan: String,
        /// What it computes.
        collective: &'static str,
    },
    /// There is another of that name.
    #[error("{origin}: there is {other} named `{plan}`; give the plan another name")]
    Name {
        /// Where the plan came from.
        origin: String,
        /// The plan's name.
        plan: String,
        /// What has it.
        other: String,
    },
}

fn others(faults: usize) -> String {
    match faults {
        0 | 1 => String::new(),
        faults => format!(" (and {} more)", faults - 1),
    }
}

/// What may be chosen for a request, or why not.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) candidate: Candidate,
    /// Thread blocks of each rank.
    pub(crate) blocks: u32,
    /// The largest message that it takes, or why it takes none.
    pub(crate) most: Result<u64, Refusal>,
}

/// The algorithms that may be chosen.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    plans: Vec<Arc<UserPlan>>,
}

impl Registry {
    /// The built-in algorithms alone.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The built-in algorithms, and the plans that `CROSSWEFT_PLANS` names in an environment that `variable` gives:
    /// files, and folders whose `.json` files are plans, with `:` between them.
    ///
    /// # Errors
    /// As for [`register_file`](Self::register_file).
    pub fn from_environment(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, RegistryError> {
        let mut registry = Self::new();
        let named = variable(PLANS_VARIABLE).unwrap_or_default();
        for path in std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty()) {
            registry.register_path(&path)?;
        }
        Ok(registry)
    }

    /// The plans beside the built-in algorithms.
    #[must_use]
    pub fn plans(&self) -> &[Arc<UserPlan>] {
        &self.plans
    }

    /// Registers a plan of which `origin` says where it came from. It is checked first. One that is there already
    /// stays as it is.
    ///
    /// # Errors
    /// [`RegistryError`]: the checker refuses it, it computes nothing that is called by name, or its name is taken.
    pub fn register(&mut self, plan: Plan, origin: &str) -> Result<Arc<UserPlan>, RegistryError> {
        let words = plan.name.clone();
        let (name, origin_of) = (|| words.clone(), || origin.to_owned());
        if Algorithm::of(plan.collective).is_empty() {
            return Err(RegistryError::Collective {
                origin: origin_of(),
                plan: name(),
                collective: plan.collective.name(),
            });
        }
        let mut faults = check::check(&plan, &check::Options::default());
        if !faults.is_empty() {
            return Err(RegistryError::Refused {
                origin: origin_of(),
                plan: name(),
                faults: faults.len(),
                first: Box::new(faults.swap_remove(0)),
            });
        }
        let taken = |other| RegistryError::Name {
            origin: origin_of(),
            plan: name(),
            other,
        };
        let built_in = Algorithm::of(plan.collective);
        if built_in.iter().any(|known| known.name() == plan.name) {
            return Err(taken("a built-in algorithm".to_owned()));
        }
        let plan = Arc::new(UserPlan::new(plan, origin));
        let alike = |known: &&Arc<UserPlan>| {
            let (a, b) = (known.constraints(), plan.constraints());
            (a.collective, a.world_size) == (b.collective, b.world_size)
        };
        for known in self.plans.iter().filter(alike) {
            let same_name = known.plan().name == plan.plan().name;
            match (same_name, known.hash() == plan.hash()) {
                (true, true) => return Ok(Arc::clone(known)),
                (true, false) => return Err(taken(format!("a plan of {}", known.origin()))),
                _ => {}
            }
        }
        self.plans.push(Arc::clone(&plan));
        Ok(plan)
    }

    /// Registers the plan of a file, of crossweft or of MSCCL++.
    ///
    /// # Errors
    /// [`RegistryError`]: also if it cannot be read.
    pub fn register_file(&mut self, path: &Path) -> Result<Arc<UserPlan>, RegistryError> {
        let origin = path.display().to_string();
        let mut text = Vec::new();
        // However much there is: no more than a plan may have.
        File::open(path)
            .and_then(|file| file.take(json::MAX_BYTES as u64 + 1).read_to_end(&mut text))
            .map_err(|source| RegistryError::File {
                path: path.to_owned(),
                source,
            })?;
        let plan = match mscclpp::is_mscclpp(&text) {
            true => mscclpp::import(&text).map(|imported| imported.plan),
            false => Plan::from_json(&text),
        };
        let plan = plan.map_err(|source| RegistryError::Plan {
            origin: origin.clone(),
            source,
        })?;
        self.register(plan, &origin)
    }

    /// Registers a file, or the `.json` files of a folder by name.
    fn register_path(&mut self, path: &Path) -> Result<(), RegistryError> {
        let failed = |source| RegistryError::File {
            path: path.to_owned(),
            source,
        };
        if !path.is_dir() {
            return self.register_file(path).map(drop);
        }
        let mut files = Vec::new();
        for entry in fs::read_dir(path).map_err(failed)? {
            let file = entry.map_err(failed)?.path();
            if file
                .extension()
                .is_some_and(|extension| extension == "json")
            {
                files.push(file);
            }
        }
        files.sort();
        files
            .iter()
            .try_for_each(|file| self.register_file(file).map(drop))
    }

    /// All candidates for a request, those that are refused too.
    pub(crate) fn entries(&self, request: &Request) -> Vec<Entry> {
        let built_in = Algorithm::of(request.collective).iter();
        let built_in = built_in.map(|algorithm| Candidate::from(*algorithm));
        let plans = self.plans.iter().cloned().map(Candidate::Plan);
        let mut entries = Vec::new();
        for candidate in built_in.chain(plans) {
            let refusal = candidate.refusal(request).map_or(Ok(()), Err);
            let most = refusal.and_then(|()| {
                // Thread blocks share scratch memory out: one has as much as many.
                let plan = candidate.plan(request.collective, request.world_size, 1);
                // One that cannot be laid out is refused with its own words when it is prepared.
                plan.map_or(Ok(0), |plan| candidate.most_bytes(&plan, request))
            });
            for blocks in candidate.blocks(request) {
                entries.push(Entry {
                    candidate: candidate.clone(),
                    blocks,
                    most,
                });
            }
        }
        entries
    }
}
