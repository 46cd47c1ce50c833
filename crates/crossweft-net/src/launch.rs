//! What a launcher says about this process, and joining with nothing else to go by.
//!
//! [`Job::detect`] asks the environment in this order; the first launcher that left a mark wins, so
//! that the innermost of several (torchrun under srun) does:
//!
//! | launcher  | rank, world size                      | local rank, local size                 | what names the job |
//! |-----------|---------------------------------------|----------------------------------------|--------------------|
//! | crossweft | `CROSSWEFT_RANK`, `CROSSWEFT_WORLD_SIZE` | `CROSSWEFT_LOCAL_RANK`, `CROSSWEFT_LOCAL_SIZE`; without them all ranks are local | nothing |
//! | torchrun  | `RANK`, `WORLD_SIZE`                  | `LOCAL_RANK`, `LOCAL_WORLD_SIZE`       | `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT` |
//! | Open MPI  | `OMPI_COMM_WORLD_RANK`, `.._SIZE`     | `OMPI_COMM_WORLD_LOCAL_RANK`, `.._LOCAL_SIZE` | `PMIX_NAMESPACE` |
//! | MPICH     | `PMI_RANK`, `PMI_SIZE`                | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS`   | `PMI_JOBID`, or else the parent process |
//! | Slurm     | `SLURM_PROCID`, `SLURM_NTASKS`        | `SLURM_LOCALID`; `SLURM_NNODES` and `SLURM_TASKS_PER_NODE` | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//!
//! [`Job::join`] finds the unique id, which holds a secret that no launcher hands out, by the first of:
//!
//! 1. `CROSSWEFT_UNIQUE_ID`. Under the crossweft launcher the rendezvous runs in the launcher; under
//!    others rank 0 runs it at the address that the id contains.
//! 2. `CROSSWEFT_ID_FILE`: rank 0 creates this file, for its user only, and removes it when the group
//!    has formed. All ranks must see the same file system.
//! 3. If all ranks are on one host: a Unix socket, which only processes of the same user can use,
//!    named by what names the job.

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use crate::error::NetError;
use crate::group::Group;
use crate::id_exchange;
use crate::join::JoinOptions;
use crate::poll;
use crate::rendezvous::{Rendezvous, RendezvousOptions};
use crate::unique_id::UniqueId;

const UNIQUE_ID: &str = "CROSSWEFT_UNIQUE_ID";
const ID_FILE: &str = "CROSSWEFT_ID_FILE";

/// This process as its launcher describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Job {
    /// This process among all.
    pub rank: u32,
    /// How many there are.
    pub world_size: u32,
    /// This process among those of its host.
    pub local_rank: u32,
    /// How many of them there are.
    pub local_size: u32,
    /// Who started it.
    pub launcher: Launcher,
    unique_id: Option<UniqueId>,
    id_file: Option<PathBuf>,
    /// What distinguishes this job from others of the same user.
    name: Option<String>,
}

/// A program that starts ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// crossweft's own, or variables set by hand.
    Crossweft,
    /// MPICH, Intel MPI, MVAPICH: Hydra.
    Mpich,
    /// Open MPI, or PRRTE.
    OpenMpi,
    /// srun.
    Slurm,
    /// torchrun, or anything that sets the variables of `torch.distributed`'s `env://`.
    Torchrun,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Crossweft => "crossweft",
            Self::Mpich => "MPICH (Hydra)",
            Self::OpenMpi => "Open MPI",
            Self::Slurm => "Slurm",
            Self::Torchrun => "torchrun",
        })
    }
}

impl Job {
    /// Reads what a launcher left in the environment; `None` if no launcher did.
    ///
    /// `env` looks up a variable: pass `&|name| std::env::var(name).ok()`. Variables that are only
    /// partly there are an error, because guessing the rest would make ranks disagree.
    pub fn detect(env: &impl Fn(&str) -> Option<String>) -> Result<Option<Self>, NetError> {
        let env = Environment(env);
        let job = match () {
            () if env.any(&["CROSSWEFT_RANK", "CROSSWEFT_WORLD_SIZE"]) => crossweft(&env)?,
            () if env.any(&["RANK", "WORLD_SIZE"]) => torchrun(&env)?,
            () if env.any(&["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]) => open_mpi(&env)?,
            // Slurm's own PMI sets these two as well, but nothing about local ranks.
            () if env.any(&["PMI_RANK", "PMI_SIZE"])
                && (env.any(&["MPI_LOCALRANKID", "MPI_LOCALNRANKS"])
                    || !env.any(&["SLURM_STEP_ID"])) =>
            {
                mpich(&env)?
            }
            // A batch script has a SLURM_PROCID too, but it is not a step of several tasks.
            () if env.any(&["SLURM_PROCID"]) && env.any(&["SLURM_STEP_ID"]) => slurm(&env)?,
            // PMIx says which rank, but not of how many.
            () if env.any(&["PMIX_RANK"]) && !env.any(&["SLURM_PROCID"]) => open_mpi(&env)?,
            () => return Ok(None),
        };
        for (variable, rank, size) in [
            ("the rank", job.rank, job.world_size),
            ("the local rank", job.local_rank, job.local_size),
            (
                "the local size",
                job.local_size,
                job.world_size.saturating_add(1),
            ),
        ] {
            if rank >= size {
                return Err(NetError::Launch {
                    variable: format!("of {} for {variable}", job.launcher),
                    reason: format!("{rank} is not below {size}; unset it if it is left over"),
                });
            }
        }
        Ok(Some(job))
    }

    /// Joins the job's group; see the [module](self) for how the ranks find each other.
    ///
    /// Where rank 0 runs the rendezvous, it does so as `rendezvous` says, but ends it a tenth before
    /// `options.timeout`: it alone knows which ranks never came, and must say so before they give up.
    pub fn join(
        &self,
        options: &JoinOptions,
        rendezvous: &RendezvousOptions,
    ) -> Result<Group, NetError> {
        let deadline = poll::after(Instant::now(), options.timeout);
        let rendezvous = &RendezvousOptions {
            timeout: rendezvous.timeout.min(options.timeout.mul_f64(0.9)),
            ..rendezvous.clone()
        };
        let join_if_proven = |id: &UniqueId, patience| {
            let timeout = deadline.saturating_duration_since(Instant::now());
            let options = JoinOptions {
                timeout,
                ..options.clone()
            };
            Group::join_if_proven(id, self.rank, self.world_size, &options, patience)
        };
        let join = |id: &UniqueId| join_if_proven(id, options.timeout);
        let cancel = options.cancel.as_ref();
        let host = |rendezvous: Rendezvous| {
            let group = join(&rendezvous.unique_id())?;
            rendezvous.wait_unless(cancel, self.rank)?;
            Ok(group)
        };
        let is_root = self.rank == 0;

        if let Some(id) = &self.unique_id {
            return match (self.launcher, is_root) {
                (Launcher::Crossweft, _) => join(id),
                (_, true) => host(Rendezvous::serve(id, rendezvous.timeout)?),
                (_, false) => {
                    id_exchange::wait_for_listener(id.address(), self.rank, cancel, deadline)?;
                    join(id)
                }
            };
        }
        if let Some(path) = &self.id_file {
            if !is_root {
                return id_exchange::from_file(path, self.rank, cancel, deadline, join_if_proven);
            }
            let rendezvous = Rendezvous::start(rendezvous)?;
            let _file = id_exchange::IdFile::create(path, &rendezvous.unique_id())?;
            return host(rendezvous);
        }
        match self.exchange_name() {
            Some(name) if self.local_size == self.world_size => join_by_name(
                &name,
                (self.rank, self.world_size),
                &JoinOptions {
                    timeout: deadline.saturating_duration_since(Instant::now()),
                    ..options.clone()
                },
                rendezvous,
            ),
            _ => Err(NetError::NoUniqueId {
                launcher: self.launcher.to_string(),
            }),
        }
    }

    fn exchange_name(&self) -> Option<String> {
        let name = match (&self.name, self.launcher) {
            (Some(name), _) => name.clone(),
            // Hydra gives a job no name, but its ranks on a host are children of one proxy.
            (None, Launcher::Mpich) => format!("parent {}", std::os::unix::process::parent_id()),
            (None, _) => return None,
        };
        Some(format!("{} {} {name}", self.launcher, self.world_size))
    }
}

/// Joins, as `rank` of `world_size`, the job of this user and this host that `name` names: rank 0 runs the
/// rendezvous as `rendezvous` says and hands its id to the others over a Unix socket, which only processes
/// of the same user can use. A name can be used again once its group has formed.
pub fn join_by_name(
    name: &str,
    (rank, world_size): (u32, u32),
    options: &JoinOptions,
    rendezvous: &RendezvousOptions,
) -> Result<Group, NetError> {
    let deadline = poll::after(Instant::now(), options.timeout);
    let join = |id: &UniqueId| {
        let timeout = deadline.saturating_duration_since(Instant::now());
        let options = JoinOptions {
            timeout,
            ..options.clone()
        };
        Group::join(id, rank, world_size, &options)
    };
    let name = id_exchange::socket_name(name);
    let cancel = options.cancel.as_ref();
    if rank != 0 {
        return join(&id_exchange::from_socket(&name, rank, cancel, deadline)?);
    }
    let rendezvous = Rendezvous::start(rendezvous)?;
    let id = rendezvous.unique_id();
    let _server = id_exchange::IdServer::start(&name, &id, world_size, cancel, deadline)?;
    let group = join(&id)?;
    rendezvous.wait_unless(cancel, rank)?;
    Ok(group)
}

fn crossweft<F: Fn(&str) -> Option<String>>(env: &Environment<'_, F>) -> Result<Job, NetError> {
    let rank = env.number("CROSSWEFT_RANK")?;
    let world_size = env.number("CROSSWEFT_WORLD_SIZE")?;
    let local = env.any(&["CROSSWEFT_LOCAL_RANK", "CROSSWEFT_LOCAL_SIZE"]);
    let (local_rank, local_size) = if local {
        (
            env.number("CROSSWEFT_LOCAL_RANK")?,
            env.number("CROSSWEFT_LOCAL_SIZE")?,
        )
    } else {
        (rank, world_size)
    };
    env.job(
        Launcher::Crossweft,
        [rank, world_size, local_rank, local_size],
        None,
    )
}

fn torchrun<F: Fn(&str) -> Option<String>>(env: &Environment<'_, F>) -> Result<Job, NetError> {
    let numbers = env.numbers(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])?;
    let name = [
        env.text("MASTER_ADDR")?,
        env.text("MASTER_PORT")?,
        env.get("TORCHELASTIC_RUN_ID").unwrap_or_default(),
        // A restarted job has the same everything else.
        env.get("TORCHELASTIC_RESTART_COUNT").unwrap_or_default(),
    ];
    env.job(Launcher::Torchrun, numbers, Some(format!("{name:?}")))
}

fn open_mpi<F: Fn(&str) -> Option<String>>(env: &Environment<'_, F>) -> Result<Job, NetError> {
    let numbers = env.numbers([
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ])?;
    env.job(Launcher::OpenMpi, numbers, env.get("PMIX_NAMESPACE"))
}

fn mpich<F: Fn(&str) -> Option<String>>(env: &Environment<'_, F>) -> Result<Job, NetError> {
    let numbers = env.numbers(["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"])?;
    env.job(Launcher::Mpich, numbers, env.get("PMI_JOBID"))
}

fn slurm<F: Fn(&str) -> Option<String>>(env: &Environment<'_, F>) -> Result<Job, NetError> {
    let [rank, world_size, local_rank, nodes] = env.numbers([
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NNODES",
    ])?;
    let local_size = if nodes == 1 {
        world_size
    } else {
        let variable = match env.get("SLURM_STEP_TASKS_PER_NODE") {
            Some(_) => "SLURM_STEP_TASKS_PER_NODE",
            None => "SLURM_TASKS_PER_NODE",
        };
        let node = env.number("SLURM_NODEID")?;
        tasks_of_node(&env.text(variable)?, node).ok_or_else(|| NetError::Launch {
            variable: variable.to_owned(),
            reason: format!("it does not say how many tasks node {node} has"),
        })?
    };
    let name = format!(
        "{} {}",
        env.text("SLURM_JOB_ID")?,
        env.text("SLURM_STEP_ID")?
    );
    env.job(
        Launcher::Slurm,
        [rank, world_size, local_rank, local_size],
        Some(name),
    )
}

/// Reads `8(x2),4`: 8 tasks on each of the first two nodes, then 4.
fn tasks_of_node(text: &str, node: u32) -> Option<u32> {
    let mut before = 0u32;
    for part in text.split(',') {
        let (tasks, repeat) = match part.trim().split_once("(x") {
            Some((tasks, repeat)) => (tasks, repeat.strip_suffix(')')?.parse().ok()?),
            None => (part.trim(), 1u32),
        };
        before = before.checked_add(repeat)?;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

/// Typed access to variables.
struct Environment<'a, F>(&'a F);

impl<F: Fn(&str) -> Option<String>> Environment<'_, F> {
    /// An empty variable counts as unset, because that is how shells unset one for a command.
    fn get(&self, name: &str) -> Option<String> {
        self.0(name).filter(|value| !value.is_empty())
    }

    fn any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.get(name).is_some())
    }

    fn text(&self, name: &str) -> Result<String, NetError> {
        self.get(name).ok_or_else(|| NetError::Launch {
            variable: name.to_owned(),
            reason: "it is not set, but others of this launcher are; set it or unset those"
                .to_owned(),
        })
    }

    fn number(&self, name: &str) -> Result<u32, NetError> {
        let text = self.text(name)?;
        text.trim().parse().map_err(|_| NetError::Launch {
            variable: name.to_owned(),
            reason: format!("{text:?} is not a number"),
        })
    }

    fn numbers<const N: usize>(&self, names: [&str; N]) -> Result<[u32; N], NetError> {
        let mut numbers = [0; N];
        for (number, name) in numbers.iter_mut().zip(names) {
            *number = self.number(name)?;
        }
        Ok(numbers)
    }

    fn job(
        &self,
        launcher: Launcher,
        [rank, world_size, local_rank, local_size]: [u32; 4],
        name: Option<String>,
    ) -> Result<Job, NetError> {
        let unique_id = self.get(UNIQUE_ID).map(|text| text.parse()).transpose();
        let unique_id = unique_id.map_err(|error: NetError| NetError::Launch {
            variable: UNIQUE_ID.to_owned(),
            reason: error.to_string(),
        })?;
        let id_file = self.get(ID_FILE).map(PathBuf::from);
        Ok(Job {
            rank,
            world_size,
            local_rank,
            local_size,
            launcher,
            unique_id,
            id_file,
            name,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(variables: &[(&str, &str)]) -> Result<Option<Job>, NetError> {
        Job::detect(&|name| {
            variables
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    const TORCHRUN: &[(&str, &str)] = &[
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", "run"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
    ];
    const OPEN_MPI: &[(&str, &str)] = &[
        ("OMPI_COMM_WORLD_RANK", "5"),
        ("OMPI_COMM_WORLD_SIZE", "8"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("PMIX_NAMESPACE", "prterun-host-1@1"),
        ("PMIX_RANK", "5"),
    ];
    const MPICH: &[(&str, &str)] = &[
        ("PMI_RANK", "5"),
        ("PMI_SIZE", "8"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "4"),
    ];
    const SLURM: &[(&str, &str)] = &[
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NNODES", "2"),
        ("SLURM_NODEID", "1"),
        ("SLURM_TASKS_PER_NODE", "4(x2)"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "0"),
    ];
    const CROSSWEFT: &[(&str, &str)] = &[
        ("CROSSWEFT_RANK", "5"),
        ("CROSSWEFT_WORLD_SIZE", "8"),
        ("CROSSWEFT_LOCAL_RANK", "1"),
        ("CROSSWEFT_LOCAL_SIZE", "4"),
    ];
    const ALL: &[(Launcher, &[(&str, &str)])] = &[
        (Launcher::Crossweft, CROSSWEFT),
        (Launcher::Torchrun, TORCHRUN),
        (Launcher::OpenMpi, OPEN_MPI),
        (Launcher::Mpich, MPICH),
        (Launcher::Slurm, SLURM),
    ];

    #[test]
    fn every_launcher_is_recognised() {
        for &(launcher, variables) in ALL {
            let job = detect(variables).unwrap().unwrap();
            let numbers = (job.rank, job.world_size, job.local_rank, job.local_size);
            assert_eq!((job.launcher, numbers), (launcher, (5, 8, 1, 4)));
        }
        assert_eq!(detect(&[]).unwrap(), None);
        assert_eq!(detect(&[("RANK", ""), ("HOME", "/root")]).unwrap(), None);
    }

    #[test]
    fn the_inner_launcher_wins() {
        for inner in 0..ALL.len() {
            let together: Vec<_> = ALL[inner..]
                .iter()
                .rev()
                .flat_map(|(_, variables)| variables.iter().copied())
                .collect();
            assert_eq!(detect(&together).unwrap().unwrap().launcher, ALL[inner].0);
        }
        let mut own_pmi = vec![("PMI_RANK", "5"), ("PMI_SIZE", "8")];
        own_pmi.extend_from_slice(SLURM);
        assert_eq!(detect(&own_pmi).unwrap().unwrap().launcher, Launcher::Slurm);
    }

    #[test]
    fn each_missing_variable_is_named() {
        let optional = [
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
            "PMIX_NAMESPACE",
            "PMIX_RANK",
            // Without one of these it is no launch by srun at all.
            "SLURM_PROCID",
            "SLURM_STEP_ID",
        ];
        for (_, variables) in ALL {
            for (missing, _) in variables
                .iter()
                .filter(|(name, _)| !optional.contains(name))
            {
                let rest: Vec<_> = variables
                    .iter()
                    .copied()
                    .filter(|(name, _)| name != missing)
                    .collect();
                let error = detect(&rest).unwrap_err();
                assert!(
                    matches!(&error, NetError::Launch { variable, .. } if variable == missing),
                    "{missing}: {error}"
                );
            }
        }
        let error = detect(&[("PMIX_RANK", "0")]).unwrap_err().to_string();
        assert!(error.contains("OMPI_COMM_WORLD_RANK"), "{error}");
    }

    #[test]
    fn nonsense_is_refused() {
        for (name, value) in [
            ("RANK", "x"),
            ("RANK", "8"),
            ("LOCAL_RANK", "4"),
            ("WORLD_SIZE", "-1"),
            ("LOCAL_WORLD_SIZE", "9"),
        ] {
            let mut variables = vec![(name, value)];
            variables.extend_from_slice(TORCHRUN);
            let error = detect(&variables).unwrap_err();
            assert!(matches!(error, NetError::Launch { .. }), "{error}");
        }
        let mut variables = vec![("CROSSWEFT_UNIQUE_ID", "12ab")];
        variables.extend_from_slice(CROSSWEFT);
        let error = detect(&variables).unwrap_err().to_string();
        assert!(
            error.contains("CROSSWEFT_UNIQUE_ID") && error.contains("256"),
            "{error}"
        );
    }

    #[test]
    fn slurm_in_a_batch_script_is_no_launch_and_one_node_needs_no_table() {
        assert_eq!(
            detect(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]).unwrap(),
            None
        );
        let variables: Vec<_> = SLURM
            .iter()
            .copied()
            .filter(|(name, _)| !name.contains("NODE"))
            .chain([("SLURM_NNODES", "1")])
            .collect();
        assert_eq!(detect(&variables).unwrap().unwrap().local_size, 8);
        assert_eq!(tasks_of_node("8(x2),4", 1), Some(8));
        assert_eq!(tasks_of_node("8(x2),4", 2), Some(4));
        assert_eq!(tasks_of_node("8(x2),4", 3), None);
        assert_eq!(tasks_of_node("8(x", 0), None);
    }

    #[test]
    fn ranks_on_several_hosts_need_an_id() {
        for &(_, variables) in ALL {
            let job = detect(variables).unwrap().unwrap();
            let error = job
                .join(&JoinOptions::default(), &RendezvousOptions::default())
                .unwrap_err();
            assert!(matches!(error, NetError::NoUniqueId { .. }), "{error}");
            assert!(error.to_string().contains("CROSSWEFT_ID_FILE"));
        }
    }

    #[test]
    fn the_name_of_a_job_tells_restarts_apart_but_not_ranks() {
        let name = |rank: &'static str, restart: &'static str| {
            let mut variables = vec![("RANK", rank), ("TORCHELASTIC_RESTART_COUNT", restart)];
            variables.extend_from_slice(TORCHRUN);
            detect(&variables).unwrap().unwrap().exchange_name()
        };
        assert_eq!(name("0", "0"), name("3", "0"));
        assert_ne!(name("0", "0"), name("0", "1"));
    }
}
