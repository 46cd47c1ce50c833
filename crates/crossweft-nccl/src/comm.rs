//! A communicator of the C interface, and the states it goes through.
//!
//! It is busy while it is being made, and, if it does not block, during each call, whatever its phase. It is idle
//! until it is suspended, revoked or finalised, or has failed; a failed one only serves to ask why, and to be taken
//! apart.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossweft_collective::{Communicator, CommunicatorOptions, DataType};
use crossweft_hal::Device;
use crossweft_net::{Cancel, Group, JoinOptions, RendezvousOptions, UniqueId};

use crate::call::{Call, CollectiveCall, Reduction, reduce_op};
use crate::config::Config;
use crate::delegate::{self, Delegate};
use crate::derive::Derived;
use crate::devices::{self, Place};
use crate::engine::{Engine, Launches};
use crate::failure;
use crate::lane::Watch;
use crate::notes::Notes;
use crate::pointer::{Address, Factor};
use crate::settings;
use crate::status::{Error, Status};
use crate::table;

/// One rank's communicator.
#[derive(Debug)]
pub(crate) struct Comm {
    config: Config,
    place: Place,
    /// Which process has made it.
    process: u32,
    timeout: Duration,
    /// Whether buffers are looked at first, on a GPU.
    checks_pointers: bool,
    /// Ends joining.
    cancel: Cancel,
    /// Set when all ranks have come.
    group: OnceLock<Arc<Group>>,
    /// Set when everything is ready.
    communicator: OnceLock<Communicator>,
    /// Set with it.
    notes: OnceLock<Arc<Notes>>,
    /// Set with it, on a GPU.
    watch: OnceLock<Arc<Watch>>,
    state: Mutex<State>,
    /// Set when everything is ready.
    engine: Mutex<Option<Engine>>,
    /// What a call that returned at once still does.
    background: Mutex<Option<JoinHandle<()>>>,
    last_error: Mutex<Option<String>>,
    derived: Mutex<Derived>,
    operations: Mutex<Operations>,
    /// Handles of registered buffers.
    registered: Mutex<BTreeSet<u64>>,
    making: Mutex<Making>,
    /// Calls that another library has done.
    delegated: Arc<AtomicU64>,
}

/// Operations that the program has made: each multiplies by a factor of one type before a sum.
#[derive(Debug, Default)]
struct Operations {
    /// How many there ever were; numbers are not used twice.
    made: i32,
    factors: BTreeMap<i32, (DataType, Factor)>,
}

/// The first number that is no operation of NCCL's: `ncclNumOps`.
const FIRST_OPERATION: i32 = 5;

/// Where a communicator is.
#[derive(Debug)]
struct State {
    /// Something is going on, during which nothing else can begin.
    busy: bool,
    phase: Phase,
}

/// What is being derived of a communicator, which ends with it.
#[derive(Debug, Default)]
enum Making {
    #[default]
    Nothing,
    Child(Arc<Comm>),
    /// Nothing ever again: the communicator was aborted, with this reason.
    Over(String),
}

/// What can be done with a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Everything.
    Idle,
    /// Nothing but to resume, or to take it apart.
    Suspended,
    /// Only to derive others, or to take it apart.
    Revoked,
    /// Only to take it apart.
    Finalized,
    /// As after this error.
    Failed(Error),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panicked holder left is looked at by nobody: its communicator has failed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Comm {
    /// One that is still to be joined.
    pub(crate) fn new(config: Config, place: Place) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            config,
            place,
            process: std::process::id(),
            timeout: settings::timeout()?,
            checks_pointers: settings::checks_pointers(),
            cancel: Cancel::new()?,
            group: OnceLock::new(),
            communicator: OnceLock::new(),
            notes: OnceLock::new(),
            watch: OnceLock::new(),
            state: Mutex::new(State {
                busy: true,
                phase: Phase::Idle,
            }),
            engine: Mutex::default(),
            background: Mutex::default(),
            last_error: Mutex::default(),
            derived: Mutex::default(),
            operations: Mutex::default(),
            registered: Mutex::default(),
            making: Mutex::default(),
            delegated: Arc::default(),
        }))
    }

    /// Refuses to be ended by a process that was forked from the one that has made it: its threads are not there, nobody would
    /// see them end, and the ranks would take this process's goodbye for the other's.
    pub(crate) fn is_of_this_process(&self) -> Result<(), Error> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(Error::usage(format!(
                "process {} has made the communicator, and this one was only forked from it: leave it to that one",
                self.process
            ))),
        }
    }

    /// What it computes on.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    pub(crate) fn is_on_gpu(&self) -> bool {
        matches!(self.place.device, Device::Cuda(_))
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// How this communicator's ranks join each other.
    pub(crate) fn join_options(&self) -> JoinOptions {
        JoinOptions {
            timeout: self.timeout,
            cancel: Some(self.cancel.clone()),
            ..JoinOptions::default()
        }
    }

    /// How they find each other. It ends sooner than joining: it alone knows who never came.
    pub(crate) fn rendezvous_options(timeout: Duration) -> RendezvousOptions {
        RendezvousOptions {
            timeout: timeout.mul_f64(0.9),
            ..RendezvousOptions::default()
        }
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Joins the others by a unique id. Blocks until all have come.
    pub(crate) fn join(&self, id: &UniqueId, rank: u32, world_size: u32) -> Result<(), Error> {
        let group = Group::join(id, rank, world_size, &self.join_options())?;
        self.complete(group)
    }

    /// Makes the communicator of a group that has been joined. Blocks until all ranks have.
    pub(crate) fn complete(&self, group: Group) -> Result<(), Error> {
        let options = CommunicatorOptions {
            timeout: self.timeout,
        };
        let group = Arc::new(group);
        // A communicator is joined once.
        let _ = self.group.set(Arc::clone(&group));
        if let Some(reason) = self.cancel.reason() {
            // Whoever cancelled may not have seen the group yet.
            group.abort(reason);
        }
        let communicator = Communicator::on(self.place.device.clone(), group, options)?;
        let deadline = std::time::Instant::now() + self.timeout;
        let (endpoint, what) = (communicator.endpoint(), "initialising the communicator");
        let plan = self.delegation();
        let said = settings::version().and_then(|version| Ok((version, plan?)));
        let (version, plan) = endpoint.settle(said, what, deadline, Error::from)?;
        let delegated = plan
            .as_ref()
            .map_or("nothing delegated".to_owned(), ToString::to_string);
        let statement = format!("NCCL version {version}, {delegated}");
        endpoint.agree(&statement, what, deadline)?;
        let delegate =
            plan.map(|plan| Delegate::new(&communicator, plan, Arc::clone(&self.delegated)));
        let notes = Notes::new(&communicator);
        let engine = Engine::new(&communicator, Arc::clone(&notes), delegate.transpose()?)?;
        if let Some(watch) = engine.watch() {
            let _ = self.watch.set(watch);
        }
        *lock(&self.engine) = Some(engine);
        let _ = self.notes.set(notes);
        settings::report();
        let _ = self.communicator.set(communicator);
        Ok(())
    }

    /// What is delegated to which library.
    fn delegation(&self) -> Result<Option<delegate::Plan>, Error> {
        let is_delegate =
            self.config.name.as_deref().map(str::as_bytes) == Some(delegate::NAME.to_bytes());
        match is_delegate {
            true => Ok(None),
            false => delegate::Plan::of_environment(),
        }
    }

    /// Calls that another library has done so far.
    pub(crate) fn delegated(&self) -> u64 {
        self.delegated.load(Ordering::Relaxed)
    }

    /// The communicator behind it, once all ranks have joined.
    pub(crate) fn communicator(&self) -> Result<&Communicator, Error> {
        self.communicator.get().ok_or_else(|| self.not_ready())
    }

    fn not_ready(&self) -> Error {
        match self.phase() {
            Phase::Failed(error) => error,
            _ => Error::early(
                "the communicator is used before the call before has ended: ask \
                 ncclCommGetAsyncError until it says ncclSuccess",
            ),
        }
    }

    pub(crate) fn rank(&self) -> Result<u32, Error> {
        Ok(self.communicator()?.rank())
    }

    pub(crate) fn world_size(&self) -> Result<u32, Error> {
        Ok(self.communicator()?.world_size())
    }

    /// The GPU's number. On the host what the program gave, or else this rank's number there.
    pub(crate) fn device(&self) -> Result<i32, Error> {
        match (&self.place.device, self.place.number) {
            (Device::Cuda(context), _) => Ok(i32::try_from(context.ordinal()).unwrap_or(i32::MAX)),
            (_, Some(number)) => Ok(number),
            (_, None) => {
                let local = self.communicator()?.endpoint().group().local_rank();
                Ok(i32::try_from(local).unwrap_or(i32::MAX))
            }
        }
    }

    /// Whether calls may be made; the communicator to make them on.
    pub(crate) fn usable(&self) -> Result<&Communicator, Error> {
        let (busy, phase) = {
            let state = lock(&self.state);
            (state.busy, state.phase.clone())
        };
        self.ready(phase)?;
        match busy {
            true => Err(self.not_ready()),
            false => self.communicator(),
        }
    }

    /// Whether calls may be made in this phase once it is no longer busy.
    fn ready(&self, phase: Phase) -> Result<(), Error> {
        match phase {
            // A launch would not tell.
            Phase::Idle if self.is_on_gpu() => self.lost().map_or(Ok(()), Err),
            Phase::Idle => Ok(()),
            Phase::Failed(error) => Err(error),
            Phase::Revoked => Err(Error::usage(
                "the communicator was revoked: split or shrink it, or destroy it",
            )),
            Phase::Finalized => Err(Error::usage(
                "the communicator was finalised: only ncclCommDestroy can follow",
            )),
            Phase::Suspended => Err(Error::usage(
                "the communicator is suspended: call ncclCommResume first",
            )),
        }
    }

    /// Whether others may be derived from it, also when it was revoked.
    pub(crate) fn derivable(&self) -> Result<&Communicator, Error> {
        match self.phase() {
            Phase::Revoked => self.idle(),
            _ => self.usable(),
        }
    }

    pub(crate) fn idle(&self) -> Result<&Communicator, Error> {
        match self.is_busy() {
            true => Err(self.not_ready()),
            false => self.communicator(),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        lock(&self.state).phase.clone()
    }

    /// Whether it has still to come about.
    pub(crate) fn is_being_made(&self) -> bool {
        self.phase() == Phase::Idle && self.communicator.get().is_none()
    }

    /// Whether something goes on.
    pub(crate) fn is_busy(&self) -> bool {
        lock(&self.state).busy
    }

    /// What went wrong without a call of this rank's, if anything did.
    fn lost(&self) -> Option<Error> {
        let failure = self.group.get()?.liveness().failure();
        let lost = failure.map(|failure| Error::of_failure(&failure));
        // What this rank found out on a GPU, the others have heard of as well, in fewer words.
        let own = || self.watch.get()?.failure();
        match &lost {
            Some(error) if error.status != Status::RemoteError => lost,
            _ => own().or(lost),
        }
    }

    /// `ncclCommGetAsyncError`.
    pub(crate) fn asynchronous(&self) -> Status {
        if self.is_busy() {
            return Status::InProgress;
        }
        let error = match self.phase() {
            Phase::Revoked | Phase::Finalized => return Status::Success,
            Phase::Failed(error) => Some(error),
            Phase::Idle | Phase::Suspended => self.lost(),
        };
        match error {
            None => Status::Success,
            Some(error) => {
                self.note(&error);
                error.status
            }
        }
    }

    /// What `ncclGetLastError` says of it.
    pub(crate) fn last_error(&self) -> Option<String> {
        lock(&self.last_error).clone()
    }

    pub(crate) fn note(&self, error: &Error) {
        let text = match &self.config.name {
            Some(name) => format!("communicator `{name}`: {error}"),
            None => error.text.clone(),
        };
        *lock(&self.last_error) = Some(text);
    }

    /// Something goes on, until [`settle`](Self::settle) or `false`.
    pub(crate) fn set_busy(&self, busy: bool) {
        lock(&self.state).busy = busy;
    }

    /// Goes on as `phase`, unless something else came first. If it is busy, it stays that until all of its work has ended:
    /// who is told earlier may begin something else, which the end of this one would then be taken for.
    pub(crate) fn enter(&self, phase: Phase) {
        if let Phase::Failed(error) = &phase {
            self.note(error);
        }
        let mut state = lock(&self.state);
        if matches!(state.phase, Phase::Idle | Phase::Suspended) {
            state.phase = phase;
        }
    }

    /// The same, and has ended what it was busy with.
    pub(crate) fn settle(&self, phase: Phase) {
        self.enter(phase);
        self.set_busy(false);
    }

    /// What was derived of it so far.
    pub(crate) fn derived(&self) -> MutexGuard<'_, Derived> {
        lock(&self.derived)
    }

    /// What other ranks can see of it, once all have joined.
    pub(crate) fn notes(&self) -> Option<&Notes> {
        self.notes.get().map(Arc::as_ref)
    }

    /// Registers a window.
    pub(crate) fn registering(
        &self,
        register: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self.notes() {
            Some(notes) => {
                notes.go_on();
                notes.registering(register)
            }
            None => Err(self.not_ready()),
        }
    }

    /// Derives `child` of it; whoever stops this one meanwhile stops that.
    pub(crate) fn deriving<T>(&self, child: &Arc<Self>, derive: impl FnOnce() -> T) -> T {
        self.notes().into_iter().for_each(Notes::go_on);
        match &mut *lock(&self.making) {
            Making::Over(reason) => child.interrupt(reason),
            making => *making = Making::Child(Arc::clone(child)),
        }
        let result = derive();
        let mut making = lock(&self.making);
        if let Making::Child(_) = *making {
            *making = Making::Nothing;
        }
        result
    }

    /// Runs calls one after the other. Blocks; the first that fails is the last.
    pub(crate) fn run(&self, calls: Vec<Call>) -> Result<(), Error> {
        match self.is_on_gpu() {
            false => self.step(|engine| engine.run(calls)),
            true => {
                self.prepare(&calls)?;
                let mut launches = self.begin(calls)?;
                while !launches.is_empty() {
                    self.launch_next(&mut launches)?;
                }
                Ok(())
            }
        }
    }

    /// Does something that all ranks do; whatever goes wrong ends the communicator.
    fn step<T>(&self, act: impl FnOnce(&mut Engine) -> Result<T, Error>) -> Result<T, Error> {
        self.notes().into_iter().for_each(Notes::go_on);
        let result = failure::guarded(|| self.with_engine(act)?);
        if let Err(error) = &result {
            // Whatever it was, ranks are no longer in step.
            self.enter(Phase::Failed(error.clone()));
            self.tell(error);
        }
        result
    }

    /// Refuses buffers that the device does not reach, where the program wants to hear that first.
    pub(crate) fn check(&self, call: &Call) -> Result<(), Error> {
        match self.checks_pointers {
            true => call
                .ranges()
                .try_for_each(|range| devices::check_buffer(&self.place.device, &range)),
            false => Ok(()),
        }
    }

    /// Whether calls can be launched on a GPU without waiting for the other ranks on the host.
    pub(crate) fn is_prepared(&self, calls: &[Call]) -> bool {
        self.with_engine(|engine| engine.is_prepared(calls))
            .unwrap_or(true)
    }

    /// Prepares calls that are to be launched on a GPU. Collective; blocks.
    pub(crate) fn prepare(&self, calls: &[Call]) -> Result<(), Error> {
        self.step(|engine| engine.prepare_all(calls))
    }

    /// Makes room for calls that were prepared, before any is launched. Blocks until what runs has ended, if there is not
    /// as much yet.
    pub(crate) fn begin(&self, calls: Vec<Call>) -> Result<Launches, Error> {
        self.step(|engine| engine.begin(calls))
    }

    /// Launches what is next of them on its stream; says whether there is more. Returns at once.
    pub(crate) fn launch_next(&self, launches: &mut Launches) -> Result<bool, Error> {
        self.step(|engine| match self.cancel.reason() {
            None => engine.launch_next(launches),
            // Whoever has stopped it meanwhile gives up what the launch would use.
            Some(reason) => Err(self.lost().unwrap_or_else(|| Error::late(reason))),
        })
    }

    /// Launches a collective by itself, if this communicator's calls are launched by whoever makes them and this one is
    /// prepared; says whether. Returns at once, and needs no memory.
    pub(crate) fn launch_prepared(&self, call: &CollectiveCall) -> Result<bool, Error> {
        match self.is_on_gpu() && self.config.blocking {
            true => self.step(|engine| engine.launch_prepared(call)),
            false => Ok(false),
        }
    }

    /// Ends the other ranks' waits if what went wrong here is nothing that they find out by themselves.
    pub(crate) fn tell(&self, error: &Error) {
        if let Some(group) = self.group.get().filter(|_| !error.shared) {
            group.abort(&error.text);
        }
    }

    /// A call was refused here before it was begun. The communicator stays as it is, but ranks that are in that call learn
    /// soon that this one does not come; but of one that was only too early it does.
    pub(crate) fn refuse(&self, error: &Error) {
        let can_call = self.phase() == Phase::Idle;
        let notes = self.notes().filter(|_| can_call && !error.early);
        notes.into_iter().for_each(Notes::refuse);
    }

    /// Does something with the engine while no call runs.
    pub(crate) fn with_engine<T>(&self, act: impl FnOnce(&mut Engine) -> T) -> Result<T, Error> {
        match &mut *lock(&self.engine) {
            Some(engine) => Ok(act(engine)),
            None => Err(self.not_ready()),
        }
    }

    /// Lets `work` go on on a thread of its own; whoever takes the communicator apart waits for it.
    pub(crate) fn continue_with(
        self: &Arc<Self>,
        work: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        let mut background = lock(&self.background);
        if let Some(before) = background.take() {
            // It has ended, or is about to: nothing is begun while a communicator is busy.
            let _ = before.join();
        }
        let thread = std::thread::Builder::new().name("crossweft-nccl".to_owned());
        *background = Some(thread.spawn(work)?);
        Ok(())
    }

    fn wait(&self) {
        if let Some(thread) = lock(&self.background).take() {
            // Panics were caught and noted where they happened.
            let _ = thread.join();
        }
    }

    /// Ends every wait of every rank. This rank's own calls have ended when this returns. Others can still be
    /// derived of it.
    pub(crate) fn stop(&self, reason: &str) {
        self.interrupt(reason);
        if let Making::Child(child) = &*lock(&self.making) {
            child.interrupt(reason);
        }
        self.wait();
        drop(lock(&self.engine));
    }

    /// Ends every wait of every rank, and every later one.
    pub(crate) fn interrupt(&self, reason: &str) {
        self.cancel.cancel(reason);
        if let Some(group) = self.group.get() {
            group.abort(reason);
        }
    }

    /// Whether this rank has ended every wait.
    pub(crate) fn is_stopped(&self) -> bool {
        self.cancel.reason().is_some()
    }

    /// `ncclCommAbort`: stops it, and nothing is derived of it any more.
    pub(crate) fn abort(&self) {
        let reason = "ncclCommAbort was called";
        let over = Making::Over(reason.to_owned());
        if let Making::Child(child) = std::mem::replace(&mut *lock(&self.making), over) {
            child.interrupt(reason);
        }
        self.stop(reason);
    }

    /// `ncclCommRevoke`.
    pub(crate) fn revoke(&self) -> Result<(), Error> {
        self.communicator()?;
        lock(&self.state).phase = Phase::Revoked;
        self.stop("ncclCommRevoke was called");
        Ok(())
    }

    /// `ncclCommFinalize`. Blocks until what runs on a GPU has ended.
    pub(crate) fn finalize(&self) -> Result<(), Error> {
        self.settle_work()?;
        self.leave_delegate();
        if let Some(group) = self.group.get() {
            group.leave();
        }
        self.enter(Phase::Finalized);
        Ok(())
    }

    /// Blocks until what was launched on a GPU has ended, at most for as long as calls may take.
    fn settle_work(&self) -> Result<(), Error> {
        match &*lock(&self.engine) {
            Some(engine) => engine.settle(),
            None => Ok(()),
        }
    }

    /// A number for an operation that multiplies by `factor` before a sum.
    pub(crate) fn make_operation(&self, dtype: DataType, factor: Factor) -> Result<i32, Error> {
        let mut operations = lock(&self.operations);
        let number = operations.made.checked_add(FIRST_OPERATION);
        let number = number.ok_or_else(|| Error::usage("too many operations were made"))?;
        operations.made += 1;
        operations.factors.insert(number, (dtype, factor));
        Ok(number)
    }

    /// Takes it away.
    pub(crate) fn forget_operation(&self, number: i32) -> Result<(), Error> {
        match lock(&self.operations).factors.remove(&number) {
            Some(_) => Ok(()),
            None => Err(Error::argument(format!(
                "op is {number}, which ncclRedOpCreatePreMulSum has not made on this communicator, or which was \
                 destroyed before"
            ))),
        }
    }

    /// What an operation does to elements of `dtype`.
    pub(crate) fn reduction(&self, number: i32, dtype: DataType) -> Result<Reduction, Error> {
        if let Some(op) = reduce_op(number) {
            return Ok(Reduction::Plain(op));
        }
        match lock(&self.operations).factors.get(&number) {
            Some(&(of, factor)) if of == dtype => Ok(Reduction::PreMultiplied(factor)),
            Some((of, _)) => Err(Error::argument(format!(
                "op {number} was made for {of}, the call is of {dtype}"
            ))),
            None => Err(Error::argument(format!(
                "op is {number}, which is no operation of this communicator"
            ))),
        }
    }

    /// A handle for a buffer that the program has registered.
    pub(crate) fn remember_buffer(&self) -> Address {
        let number = table::number();
        lock(&self.registered).insert(number);
        Address::of(number)
    }

    /// Takes it away.
    pub(crate) fn forget_buffer(&self, handle: Address) -> Result<(), Error> {
        match lock(&self.registered).remove(&handle.number()) {
            true => Ok(()),
            false => Err(Error::argument(
                "handle is not of ncclCommRegister on this communicator, or was deregistered before",
            )),
        }
    }

    /// `ncclCommSuspend`.
    pub(crate) fn suspend(&self) -> Result<(), Error> {
        self.ready(self.phase())?;
        self.with_engine(Engine::clear)??;
        self.enter(Phase::Suspended);
        Ok(())
    }

    /// `ncclCommResume`.
    pub(crate) fn resume(&self) -> Result<(), Error> {
        match self.phase() {
            Phase::Suspended => {
                self.enter(Phase::Idle);
                Ok(())
            }
            _ => Err(Error::usage("the communicator is not suspended")),
        }
    }

    /// `ncclCommMemStats`, of what the communicator has allocated where it computes.
    pub(crate) fn memory(&self, stat: i32) -> Result<u64, Error> {
        self.communicator()?;
        match stat {
            0 => self.with_engine(|engine| engine.scratch_bytes()),
            1 => Ok(u64::from(self.phase() == Phase::Suspended)),
            2 => self.with_engine(|engine| engine.lasting_bytes()),
            3 => self.with_engine(|engine| engine.scratch_bytes() + engine.lasting_bytes()),
            _ => Err(Error::argument(format!("stat is {stat}, which is none"))),
        }
    }

    fn leave_delegate(&self) {
        let in_order = matches!(
            self.phase(),
            Phase::Idle | Phase::Suspended | Phase::Finalized
        );
        // A call that still runs in another thread is nothing to wait for here: then the delegate ends with it.
        if let Ok(mut engine) = self.engine.try_lock()
            && let Some(engine) = &mut *engine
        {
            engine.leave(in_order && self.lost().is_none());
        }
    }

    /// Leaves the other ranks in good order. What was called has ended by then.
    pub(crate) fn leave(&self) {
        self.wait();
        if let Err(error) = self.settle_work() {
            // Nobody else asks any more; what still runs is ended with the engine.
            self.note(&error);
            self.tell(&error);
        }
        self.leave_delegate();
        if let Some(group) = self.group.get() {
            group.leave();
        }
    }
}
