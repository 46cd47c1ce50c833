//! What a rank of the campaign does: a small job with a place for a fault in every phase.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossweft_collective::{
    Algorithm, AllReduce, AllReduceOptions, CollectiveError, Communicator, CommunicatorOptions,
    DataType, ReduceOp,
};
use crossweft_net::{Cancel, Group, JoinOptions, UniqueId};
use rustix::process::{Signal, getpid, kill_process};

use crate::{Fault, Phase, VICTIM, WORLD};

/// Says something to the driver.
fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").unwrap();
    out.flush().unwrap();
}

/// What the driver says to a rank, in the environment.
pub(crate) struct Script {
    pub(crate) id: UniqueId,
    pub(crate) rank: u32,
    pub(crate) fault: Fault,
    pub(crate) phase: Phase,
    pub(crate) timeout: Duration,
}

impl Script {
    /// `None` in the driver itself.
    pub(crate) fn from_environment() -> Option<Self> {
        let read = |name: &str| std::env::var(format!("FAULTS_{name}")).unwrap();
        let id = std::env::var("FAULTS_ID").ok()?.parse().unwrap();
        Some(Self {
            id,
            rank: read("RANK").parse().unwrap(),
            fault: Fault::from_name(&read("FAULT")),
            phase: Phase::from_name(&read("PHASE")),
            timeout: Duration::from_millis(read("TIMEOUT").parse().unwrap()),
        })
    }

    fn is_victim(&self) -> bool {
        self.rank == VICTIM
    }

    fn has(&self, fault: Fault) -> bool {
        self.is_victim() && self.fault == fault
    }
}

/// Runs one rank to its end and says how that was, and what is left of it in this process.
pub(crate) fn main(script: &Script) {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(tracing::Level::WARN)
        .init();
    let before = Footprint::now();
    match run(script) {
        Ok(()) => say("end ok"),
        Err(error) if error.is_lost_peer_or_timeout() => say(&format!("end lost: {error}")),
        Err(error) => say(&format!("end usage: {error}")),
    }
    // Threads that were joined may take a moment to vanish from /proc.
    let start = Instant::now();
    while Footprint::now() != before && start.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(20));
    }
    match Footprint::now() {
        after if after == before => say("left nothing"),
        after => say(&format!("left {after:?} of {before:?}")),
    }
}

/// What a job must give back even where its process goes on.
#[derive(Debug, PartialEq, Eq)]
struct Footprint {
    descriptors: usize,
    threads: usize,
    shared_mappings: usize,
}

impl Footprint {
    fn now() -> Self {
        let count = |path: &str| std::fs::read_dir(path).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            shared_mappings: maps.lines().filter(|l| l.contains("/memfd:")).count(),
        }
    }
}

fn run(script: &Script) -> Result<(), CollectiveError> {
    let &Script {
        rank,
        fault,
        phase,
        timeout,
        ..
    } = script;
    if script.has(Fault::Version) {
        return speak_another_version(&script.id);
    }
    let cancel = Cancel::new()?;
    let join = JoinOptions {
        timeout,
        silence_after: Duration::from_secs(1),
        cancel: Some(cancel.clone()),
        ..JoinOptions::default()
    };

    let cancel = move |reason: &str| cancel.cancel(reason);
    before(script, Phase::BeforeJoin, &cancel);
    if phase == Phase::InJoin {
        match rank {
            // Meanwhile the others have joined and wait.
            2 => std::thread::sleep(Duration::from_millis(1500)),
            VICTIM => inject(script, Duration::from_millis(500), cancel.clone()),
            _ => {}
        }
    }
    let mut world = WORLD;
    if script.has(Fault::WorldSize) {
        world += 1;
    }
    let id = match script.has(Fault::Secret) {
        true => with_another_secret(&script.id),
        false => script.id.clone(),
    };
    let group = Arc::new(Group::join(&id, rank, world, &join)?);
    say(&format!("tag {}", hex(&group.tag())));
    let communicator = Communicator::new(group, CommunicatorOptions { timeout })?;
    let abort = {
        let communicator = communicator.clone();
        move |reason: &str| communicator.abort(reason)
    };

    if phase == Phase::BeforePrepare {
        // Nobody is still setting up.
        communicator.barrier()?;
    }
    before(script, Phase::BeforePrepare, &abort);
    if script.has(Fault::Collective) {
        communicator.barrier()?;
    }
    let mut options = small();
    match fault {
        Fault::DataType if script.is_victim() => options.dtype = DataType::F64,
        Fault::Operation if script.is_victim() => options.op = ReduceOp::Max,
        Fault::Size if script.is_victim() => options.max_bytes *= 2,
        Fault::Algorithm if script.is_victim() => options.algorithm = Some(Algorithm::Ring),
        _ => {}
    }
    let small = communicator.all_reduce(options)?;
    if phase == Phase::InPrepare {
        for round in 0..60 {
            if round == 20 {
                inject(script, Duration::from_micros(500), abort.clone());
            }
            communicator.all_reduce(large())?;
        }
    }
    let large = communicator.all_reduce(large())?;
    check(&small, rank, 16)?;

    before(script, Phase::BeforeExecute, &abort);
    check(&small, rank, 16)?;
    if phase == Phase::InExecute {
        for round in 0..600 {
            if round == 200 {
                inject(script, Duration::from_micros(300), abort.clone());
            }
            check(&large, rank, 100_000)?;
        }
    }

    if phase == Phase::Between {
        communicator.barrier()?;
        inject(script, Duration::from_millis(200), abort.clone());
        std::thread::sleep(Duration::from_millis(700));
        check(&small, rank, 16)?;
    }
    check(&large, rank, 100_000)?;
    communicator.barrier()?;
    before(script, Phase::BeforeLeave, &abort);
    communicator.leave();
    Ok(())
}

/// Few bytes, in packets from everybody to everybody.
fn small() -> AllReduceOptions {
    AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 64).algorithm(Algorithm::OneShot)
}

/// Any size.
fn large() -> AllReduceOptions {
    AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 400_000)
}

fn check(all_reduce: &AllReduce, rank: u32, count: usize) -> Result<(), CollectiveError> {
    let input: Vec<u8> = (0..count)
        .flat_map(|i| ((i % 100) as f32 + rank as f32).to_le_bytes())
        .collect();
    let mut output = vec![0; input.len()];
    all_reduce.run(&input, &mut output)?;
    for (i, word) in output.chunks_exact(4).enumerate() {
        let value = f32::from_le_bytes(word.try_into().unwrap());
        let right = (WORLD * (WORLD - 1) / 2) as f32 + (WORLD as usize * (i % 100)) as f32;
        assert_eq!(value, right, "element {i}");
    }
    Ok(())
}

/// The fault, if this is the rank and the phase: the others go on, or wait for the victim.
fn before(script: &Script, phase: Phase, abort: &(impl Fn(&str) + Clone + Send + 'static)) {
    if phase != script.phase {
        return;
    }
    match script.fault {
        // Another thread aborts while this one waits: rank 2 sees to it that there is something to
        // wait for.
        Fault::Abort if script.is_victim() => {
            inject(script, Duration::from_millis(300), abort.clone());
        }
        Fault::Abort if script.rank == 2 => std::thread::sleep(Duration::from_millis(1000)),
        _ if script.is_victim() => {
            // By then the others have come to where they wait for it.
            std::thread::sleep(Duration::from_millis(200));
            strike(script.fault, abort);
        }
        _ => {}
    }
}

/// The fault in some time, on another thread, if this is the rank.
fn inject(script: &Script, delay: Duration, abort: impl Fn(&str) + Send + 'static) {
    if script.is_victim() {
        let fault = script.fault;
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            strike(fault, &abort);
        });
    }
}

/// Whether the fault has happened: it does once.
static STRUCK: AtomicBool = AtomicBool::new(false);

fn strike(fault: Fault, abort: &impl Fn(&str)) {
    let signal = match fault {
        Fault::Death => Signal::KILL,
        Fault::Interrupt => Signal::INT,
        Fault::Stop | Fault::StopForever => Signal::STOP,
        Fault::Crash | Fault::Late(_) | Fault::Abort => Signal::CONT,
        // What ranks do differently shows by itself.
        _ => return,
    };
    if STRUCK.swap(true, Ordering::SeqCst) {
        return;
    }
    say("struck");
    match fault {
        Fault::Late(time) => std::thread::sleep(Duration::from_millis(time)),
        Fault::Abort => abort("out of patience"),
        Fault::Crash => std::process::abort(),
        _ => {
            kill_process(getpid(), signal).unwrap();
            // It takes a moment until all threads are hit, in which this one must not go on.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn with_another_secret(id: &UniqueId) -> UniqueId {
    let mut bytes = id.to_bytes();
    bytes[40] ^= 0xff;
    UniqueId::from_bytes(&bytes).unwrap()
}

/// Joins as a crossweft that speaks version 999 would, and says what it is told.
fn speak_another_version(id: &UniqueId) -> Result<(), CollectiveError> {
    use crossweft_net::auth::{ROOT, Role, prove};
    use std::io::Read;

    let mut stream = std::net::TcpStream::connect(id.address()).unwrap();
    let role = Role::Initiate {
        purpose: 1,
        own_rank: VICTIM,
        peer_rank: ROOT,
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    prove(&mut stream, &key_of(id), role, deadline)?;
    let hello = b"CWFT\xe7\x03\x01\0\x04\0\0\0what";
    stream.write_all(hello).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    // Magic, the version of the rendezvous, the kind of a refusal.
    assert_eq!(&answer[..4], b"CWFT");
    assert_eq!(answer[6], 4, "{answer:?}");
    say("struck");
    Ok(())
}

/// What only members of a job have: from a job of one rank with the same secret.
fn key_of(id: &UniqueId) -> crossweft_net::auth::Key {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let mut bytes = id.to_bytes();
    bytes[28..30].copy_from_slice(&port.to_le_bytes());
    let own = UniqueId::from_bytes(&bytes).unwrap().to_string();
    let environment = |name: &str| {
        Some(match name {
            "RANK" | "LOCAL_RANK" => "0".to_owned(),
            "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => "1".to_owned(),
            "MASTER_ADDR" | "MASTER_PORT" => "unused".to_owned(),
            "CROSSWEFT_UNIQUE_ID" => own.clone(),
            _ => return None,
        })
    };
    let job = crossweft_net::launch::Job::detect(&environment);
    let group = job.unwrap().unwrap().join(
        &JoinOptions::default(),
        &crossweft_net::RendezvousOptions::default(),
    );
    group.unwrap().key().clone()
}
