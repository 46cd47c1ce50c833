//! `crossweft run`: a program that uses NCCL, with crossweft's library in NCCL's place.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

use clap::{Args, ValueEnum};
use crossweft_collective::Devices;
use rustix::process::Signal;

use crate::complain;
use crate::exit::Exit;
use crate::job::{JobError, Processes, die_with};

/// Where the library tells this command that a process uses it.
const REPORT: &str = "CROSSWEFT_RUN_REPORT";
/// Bytes of what is told, at most.
const MAX_REPORT: usize = 4096;
/// The library's file, beside this command or in the `lib` folder beside its own.
const LIBRARY: &str = "libcrossweft_nccl.so";

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Start so many processes, and tell each its rank. Without it the program is started once and told nothing, as
    /// for one that is a launcher itself.
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    ranks: Option<u32>,
    /// Tell the ranks in the variables of this launcher. All get MASTER_ADDR and MASTER_PORT, too.
    #[arg(long = "as", value_enum, default_value_t = Variables::Torchrun)]
    variables: Variables,
    /// The library; it lies beside this command unless given.
    #[arg(long)]
    library: Option<PathBuf>,
    /// This process was started by this command, whose process id this is, to become the program.
    #[arg(long, hide = true)]
    child_of: Option<String>,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// The variables in which a launcher says who a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Variables {
    /// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
    Torchrun,
    /// Open MPI's: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    Mpirun,
    /// Slurm's: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NNODES, SLURM_NODEID
    Srun,
}

impl Variables {
    /// Those of `rank` of `ranks` on one host.
    fn of(self, rank: u32, ranks: u32) -> Vec<(&'static str, u32)> {
        match self {
            Self::Torchrun => vec![
                ("RANK", rank),
                ("WORLD_SIZE", ranks),
                ("LOCAL_RANK", rank),
                ("LOCAL_WORLD_SIZE", ranks),
            ],
            Self::Mpirun => vec![
                ("OMPI_COMM_WORLD_RANK", rank),
                ("OMPI_COMM_WORLD_SIZE", ranks),
                ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", ranks),
            ],
            Self::Srun => vec![
                ("SLURM_PROCID", rank),
                ("SLURM_NTASKS", ranks),
                ("SLURM_LOCALID", rank),
                ("SLURM_NNODES", 1),
                ("SLURM_NODEID", 0),
            ],
        }
    }
}

/// Why nothing was run, or how it ended.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(
        "{LIBRARY} is not beside this command: build it with `cargo build --release -p crossweft-nccl`, or \
         give --library"
    )]
    NoLibrary,
    #[error("library {}: {source}", path.display())]
    Library {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "library {}: the loader takes spaces and colons for the end of a name; put it where the path has none",
        path.display()
    )]
    Separator { path: PathBuf },
    #[error("cannot start {}: {source}", program.display())]
    Start {
        program: PathBuf,
        source: std::io::Error,
    },
    #[error("{0}")]
    Orphan(Box<JobError>),
    #[error("{what}: {source}")]
    System {
        what: &'static str,
        source: std::io::Error,
    },
}

/// Runs the program; its exit code, or that of the first rank that failed.
pub(crate) fn run(options: &Options) -> ExitCode {
    match try_run(options) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let text = format!("error: {error}");
            if options.child_of.is_none() || !tell(&text) {
                complain(&text);
            }
            Exit::Usage.into()
        }
    }
}

/// Tells the process that has started this one why it is not the program, which it then says once for all ranks; `false` if
/// that cannot be.
fn tell(text: &str) -> bool {
    let told = || {
        let name = std::env::var_os(REPORT)?;
        let address = SocketAddr::from_abstract_name(name.as_bytes()).ok()?;
        let length = text.floor_char_boundary(MAX_REPORT);
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_nonblocking(true).ok()?;
        socket
            .send_to_addr(&text.as_bytes()[..length], &address)
            .ok()
    };
    told().is_some()
}

fn try_run(options: &Options) -> Result<u8, RunError> {
    let library = library(options.library.as_deref())?;
    if library
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|b| b" :".contains(b))
    {
        return Err(RunError::Separator { path: library });
    }
    if let Some(parent) = &options.child_of {
        return Err(become_program(options, parent, &library));
    }
    let system = |what| move |source| RunError::System { what, source };
    let name = format!("crossweft-run-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).map_err(system("naming a socket"))?;
    let reports = UnixDatagram::bind_addr(&address).map_err(system("listening for the library"))?;
    reports
        .set_nonblocking(true)
        .map_err(system("listening for the library"))?;

    // Of a host without a GPU a program's pointers can only be the host's.
    let device = match Devices::cuda() {
        Ok(_) => "cuda",
        Err(_) => "cpu",
    };
    let ranks = options.ranks.unwrap_or(1);
    let port = free_port().map_err(system("finding a free port"))?;
    let own = std::env::current_exe().map_err(system("finding this command's own file"))?;
    let mut job = Processes::default();
    for rank in 0..ranks {
        let mut command = Command::new(&own);
        command
            .args(["run", "--child-of", &std::process::id().to_string()])
            .args(options.ranks.map(|ranks| format!("--ranks={ranks}")))
            .arg("--library")
            .arg(&library)
            .arg("--")
            .args(&options.program)
            .env(REPORT, &name);
        if std::env::var_os("CROSSWEFT_DEVICE").is_none() {
            command.env("CROSSWEFT_DEVICE", device);
        }
        if options.ranks.is_some() {
            for (name, number) in options.variables.of(rank, ranks) {
                command.env(name, number.to_string());
            }
            command.env("MASTER_ADDR", "127.0.0.1");
            command.env("MASTER_PORT", port.to_string());
        }
        let child = command.spawn().map_err(|source| RunError::Start {
            program: own.clone(),
            source,
        })?;
        job.add(rank, child);
    }

    let mut heard = Heard::default();
    let mut failed = None;
    let hear = || heard.hear(&reports);
    job.wait(hear, |_, status| {
        failed = failed.or(Some(code(status)).filter(|&code| code != 0));
    })
    .map_err(system("waiting for the program"))?;
    heard.hear(&reports);
    if heard.errors.is_empty() {
        say(&heard.users, &library);
    }
    Ok(failed.unwrap_or(0))
}

/// Becomes the program, which ends when the process that has started this one is gone: a rank at once, a launcher as it
/// ends when it is asked to, with what it has started itself. Returns why that failed.
fn become_program(options: &Options, parent: &str, library: &Path) -> RunError {
    let signal = match options.ranks {
        Some(_) => Signal::KILL,
        None => Signal::TERM,
    };
    if let Err(error) = die_with(parent, signal) {
        return RunError::Orphan(Box::new(error));
    }
    let mut command = Command::new(&options.program[0]);
    command
        .args(&options.program[1..])
        .env("LD_PRELOAD", preload(library));
    RunError::Start {
        source: command.exec(),
        program: options.program[0].clone().into(),
    }
}

/// The library that was asked for, or the one beside this command.
fn library(given: Option<&Path>) -> Result<PathBuf, RunError> {
    if let Some(path) = given {
        return path.canonicalize().map_err(|source| RunError::Library {
            path: path.to_owned(),
            source,
        });
    }
    let own = std::env::current_exe().ok();
    let folder = own
        .as_deref()
        .and_then(Path::parent)
        .ok_or(RunError::NoLibrary)?;
    let places = [folder.join(LIBRARY), folder.join("../lib").join(LIBRARY)];
    let found = places.iter().find_map(|place| place.canonicalize().ok());
    found.ok_or(RunError::NoLibrary)
}

/// The library before whatever is preloaded anyway.
fn preload(library: &Path) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

/// A port that nobody listens on now.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// What processes have told.
#[derive(Debug, Default)]
struct Heard {
    /// Those that use the library.
    users: BTreeSet<u32>,
    /// Why some did not become the program.
    errors: BTreeSet<String>,
}

impl Heard {
    /// Takes note of what has been told; an error is said when it is new.
    fn hear(&mut self, reports: &UnixDatagram) {
        let mut text = [0; MAX_REPORT];
        while let Ok(length) = reports.recv(&mut text) {
            let text = String::from_utf8_lossy(&text[..length]);
            if let Ok(pid) = text.parse() {
                self.users.insert(pid);
            } else if text.starts_with("error: ") && self.errors.insert(text.to_string()) {
                complain(&text);
            }
        }
    }
}

fn say(users: &BTreeSet<u32>, library: &Path) {
    let library = library.display();
    complain(&match users.len() {
        0 => format!(
            "crossweft run: no process has made a communicator with {library}: does the program use NCCL, and is it \
             neither linked statically nor told where NCCL lies (VLLM_NCCL_SO_PATH, SGLANG_NCCL_SO_PATH)?"
        ),
        1 => format!("crossweft run: 1 process has made communicators with {library}"),
        n => format!("crossweft run: {n} processes have made communicators with {library}"),
    });
}

/// As a shell has it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}
