//! Running thread blocks: each is a coroutine, so hundreds of them share one thread, and a wait is
//! the only place where one gives way to another. A seeded schedule also switches between
//! operations, in an order that a test can repeat.

use std::cell::Cell;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use crossweft_device::{Block, Raw, Stopped, Waiting};

use super::idle::{Context, Idle};
use crate::HalError;

/// In which order blocks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Schedule {
    /// Block after block, each until it must wait.
    #[default]
    RoundRobin,
    /// Random, switching after every operation and at every wait; the same for the same seed.
    Seeded(u64),
}

/// A launch that was ended while a block waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted {
    /// Why.
    pub stopped: Stopped,
    /// What the block was waiting for.
    pub waiting: Waiting,
    /// Which block.
    pub block: u32,
}

/// A thread block on the host: one thread, one coroutine.
pub struct HostBlock<'a> {
    context: &'a Context<'a>,
    mode: Mode<'a>,
}

impl std::fmt::Debug for HostBlock<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostBlock")
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

enum Mode<'a> {
    /// The only block of its grid: it waits right where it is.
    Alone {
        idle: Idle,
        interrupted: &'a Cell<Option<Interrupted>>,
    },
    /// One of many: it hands its waits to the scheduler.
    Coroutine {
        yielder: &'a Yielder<Resume, Event>,
        preempt: bool,
    },
}

impl Block for HostBlock<'_> {
    type Memory = Raw;

    #[inline(always)]
    fn memory(&self) -> &Raw {
        &Raw
    }

    #[inline(always)]
    fn thread(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn threads(&self) -> u32 {
        1
    }

    #[inline(always)]
    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped> {
        mine
    }

    #[cold]
    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped> {
        match &self.mode {
            Mode::Alone { idle, interrupted } => {
                if waiting.spins == 0 {
                    idle.reset();
                }
                idle.pause(self.context, waiting, 0)
                    .inspect_err(|&stopped| {
                        interrupted.set(Some(Interrupted {
                            stopped,
                            waiting: *waiting,
                            block: 0,
                        }));
                    })
            }
            Mode::Coroutine { yielder, .. } => match yielder.suspend(Event::Waiting(*waiting)) {
                Resume::Go => Ok(()),
                Resume::Stop(stopped) => Err(stopped),
                Resume::Start { .. } | Resume::Exit => Err(Stopped::Aborted),
            },
        }
    }

    #[cold]
    fn refuse(&self, waiting: &Waiting) -> Stopped {
        let waiting = *waiting;
        match &self.mode {
            Mode::Alone { interrupted, .. } => interrupted.set(Some(Interrupted {
                stopped: Stopped::Mismatch,
                waiting,
                block: 0,
            })),
            Mode::Coroutine { yielder, .. } => {
                // Comes back with the order to stop.
                yielder.suspend(Event::Refused(waiting));
            }
        }
        Stopped::Mismatch
    }

    #[inline(always)]
    fn wake(&self, peer: u32) {
        if let Some(bell) = self.context.peers.get(peer as usize) {
            bell.ring();
        }
    }

    #[inline(always)]
    fn checkpoint(&self) {
        if let Mode::Coroutine {
            yielder,
            preempt: true,
        } = self.mode
        {
            // A stop is delivered at the next wait.
            yielder.suspend(Event::Checkpoint);
        }
    }
}

/// What a launch runs in each block.
type Body<'a> = dyn Fn(&HostBlock<'_>, u32) -> Result<(), Stopped> + 'a;

/// A launch, as its coroutines see it.
struct Job<'a> {
    context: &'a Context<'a>,
    body: &'a Body<'a>,
    preempt: bool,
}

/// What a coroutine is resumed with.
enum Resume {
    /// Run the block of this launch. The pointer is valid until the launch ends.
    Start { job: *const (), block: u32 },
    /// Go on.
    Go,
    /// End the wait.
    Stop(Stopped),
    /// Return; there will be no more launches.
    Exit,
}

/// What a coroutine hands back.
enum Event {
    /// Nothing to do yet, or done with the launch.
    Parked(Result<(), Stopped>),
    Checkpoint,
    Waiting(Waiting),
    /// A peer makes another call.
    Refused(Waiting),
}

/// Coroutines and their stacks for a number of blocks, made once; launches allocate nothing.
pub struct Grid {
    coroutines: Vec<Coroutine<Resume, Event, ()>>,
    /// Blocks that are still running come first.
    order: Vec<u32>,
    /// Whether a block is in the middle of a launch.
    running: Vec<bool>,
    blocks: u32,
    schedule: Schedule,
    random: u64,
}

// SAFETY: between launches each coroutine is parked in `work` and its stack holds nothing but that
// function's frame, which refers to no thread. During a launch the grid is borrowed by it.
unsafe impl Send for Grid {}

impl std::fmt::Debug for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grid")
            .field("blocks", &self.blocks)
            .field("schedule", &self.schedule)
            .finish_non_exhaustive()
    }
}

/// Enough for the op loop and the reduction tiles (some 12 KiB) with much to spare.
const STACK_BYTES: usize = 128 * 1024;

/// A coroutine's life: launch after launch.
fn work(yielder: &Yielder<Resume, Event>, mut resume: Resume) {
    while let Resume::Start { job, block } = resume {
        // SAFETY: `Grid::launch` keeps the job alive until this block has parked again, and never
        // resumes a coroutine with a job that has ended.
        let job = unsafe { &*job.cast::<Job<'_>>() };
        let mode = Mode::Coroutine {
            yielder,
            preempt: job.preempt,
        };
        let result = (job.body)(
            &HostBlock {
                context: job.context,
                mode,
            },
            block,
        );
        resume = yielder.suspend(Event::Parked(result));
    }
}

impl Grid {
    /// A grid of `blocks` thread blocks.
    ///
    /// # Errors
    /// [`HalError::Resource`] if there is no memory for the stacks.
    pub fn new(blocks: u32, schedule: Schedule) -> Result<Self, HalError> {
        // A block alone needs no coroutine: it runs on the caller's stack.
        let count = if blocks == 1 { 0 } else { blocks };
        let mut coroutines = Vec::new();
        for _ in 0..count {
            let stack = DefaultStack::new(STACK_BYTES).map_err(|source| HalError::Resource {
                what: format!("the stacks of {blocks} thread blocks"),
                source,
            })?;
            coroutines.push(Coroutine::with_stack(stack, work));
        }
        let random = match schedule {
            Schedule::RoundRobin => 0,
            Schedule::Seeded(seed) => seed ^ 0x9e37_79b9_7f4a_7c15,
        };
        let order = (0..count).collect();
        let running = vec![false; count as usize];
        Ok(Self {
            coroutines,
            order,
            running,
            blocks,
            schedule,
            random,
        })
    }

    /// Thread blocks of each launch.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Runs `body` once for every block and returns when all have ended.
    ///
    /// # Errors
    /// [`Interrupted`] with the wait that was ended; the other blocks were ended with it.
    pub fn launch(&mut self, context: &Context<'_>, body: &Body<'_>) -> Result<(), Interrupted> {
        if self.blocks == 1 {
            let interrupted = Cell::new(None);
            let mode = Mode::Alone {
                idle: Idle::default(),
                interrupted: &interrupted,
            };
            return body(&HostBlock { context, mode }, 0).map_err(|stopped| {
                let waiting = Waiting::default();
                interrupted.get().unwrap_or(Interrupted {
                    stopped,
                    waiting,
                    block: 0,
                })
            });
        }
        let preempt = matches!(self.schedule, Schedule::Seeded(_));
        let job = Job {
            context,
            body,
            preempt,
        };
        self.run(context, std::ptr::from_ref(&job).cast())
    }

    fn run(&mut self, context: &Context<'_>, job: *const ()) -> Result<(), Interrupted> {
        let idle = Idle::default();
        let mut live = self.blocks as usize;
        let mut interrupted: Option<Interrupted> = None;
        if self.running.contains(&true) {
            // A launch before this one panicked half-way.
            let waiting = Waiting::default();
            return Err(Interrupted {
                stopped: Stopped::Aborted,
                waiting,
                block: 0,
            });
        }
        // Resumes in a row that led nowhere: when every live block had its turn, the rank idles.
        let mut vain = 0;
        let mut turn = 0;
        while live > 0 {
            let at = match self.schedule {
                Schedule::RoundRobin => turn % live,
                Schedule::Seeded(_) => self.next_below(live),
            };
            turn = at + 1;
            // `at` is below `live`, which is at most the number of blocks.
            let block = self.order[at];
            let running = &mut self.running[block as usize];
            let resume = match interrupted {
                _ if !*running => Resume::Start { job, block },
                Some(end) => Resume::Stop(end.stopped),
                None => Resume::Go,
            };
            *running = true;
            let CoroutineResult::Yield(event) = self.coroutines[block as usize].resume(resume)
            else {
                unreachable!("a coroutine returns only on Exit");
            };
            match event {
                Event::Parked(result) => {
                    self.running[block as usize] = false;
                    live -= 1;
                    self.order.swap(at, live);
                    turn = at;
                    vain = 0;
                    if let Err(stopped) = result {
                        let waiting = Waiting::default();
                        interrupted.get_or_insert(Interrupted {
                            stopped,
                            waiting,
                            block,
                        });
                    }
                }
                Event::Checkpoint => vain = 0,
                Event::Refused(waiting) => {
                    interrupted.get_or_insert(Interrupted {
                        stopped: Stopped::Mismatch,
                        waiting,
                        block,
                    });
                }
                Event::Waiting(waiting) if waiting.spins == 0 => {
                    vain = 0;
                    idle.reset();
                }
                Event::Waiting(waiting) => {
                    vain += 1;
                    if vain >= live && interrupted.is_none() {
                        vain = 0;
                        if let Err(stopped) = idle.pause(context, &waiting, block) {
                            interrupted = Some(Interrupted {
                                stopped,
                                waiting,
                                block,
                            });
                        }
                    }
                }
            }
        }
        interrupted.map_or(Ok(()), Err)
    }

    /// A number below `bound`, by xorshift64: the schedule need not be good, only repeatable.
    fn next_below(&mut self, bound: usize) -> usize {
        let mut x = self.random.max(1);
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random = x;
        usize::try_from(x % bound as u64).unwrap_or(0)
    }
}

impl Drop for Grid {
    fn drop(&mut self) {
        for (coroutine, &running) in self.coroutines.iter_mut().zip(&self.running) {
            // Parked ones return; one that a panic left in the middle is unwound by its own drop.
            if !running && coroutine.started() && !coroutine.done() {
                coroutine.resume(Resume::Exit);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

    use crossweft_device::wait::{Site, wait_for};

    use super::*;
    use crate::cpu::Supervisor;

    struct Until(Option<Instant>);

    impl Supervisor for Until {
        fn check(&self, _: &Waiting, _: u32) -> Result<(), Stopped> {
            match self.0 {
                Some(deadline) if Instant::now() > deadline => Err(Stopped::Deadline),
                _ => Ok(()),
            }
        }
    }

    fn context(supervisor: &Until) -> Context<'_> {
        Context {
            supervisor,
            bell: None,
            peers: &[],
            spin: true,
        }
    }

    /// Each block waits for the one before it to have counted.
    fn chain(grid: &mut Grid, first: u32, until: &Until) -> Result<Vec<u32>, Interrupted> {
        let count = AtomicU32::new(0);
        let log = std::sync::Mutex::new(Vec::new());
        grid.launch(&context(until), &|block, index| {
            let load = || u64::from(count.load(Ordering::Relaxed) + first);
            wait_for(block, Site::default(), index.into(), load, |seen| {
                seen >= index.into()
            })?;
            log.lock().unwrap().push(index);
            block.checkpoint();
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(log.into_inner().unwrap())
    }

    #[test]
    fn hundreds_of_blocks_that_wait_for_each_other() {
        for schedule in [
            Schedule::RoundRobin,
            Schedule::Seeded(7),
            Schedule::Seeded(8),
        ] {
            let mut grid = Grid::new(300, schedule).unwrap();
            for _ in 0..3 {
                let log = chain(&mut grid, 0, &Until(None)).unwrap();
                assert_eq!(log, (0..300).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_seed_repeats_a_schedule_and_another_differs() {
        let order = |seed| {
            let mut grid = Grid::new(16, Schedule::Seeded(seed)).unwrap();
            // With a head start of 16 nobody waits: the order is the schedule's alone.
            chain(&mut grid, 16, &Until(None)).unwrap()
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    #[test]
    fn a_deadline_ends_every_block_and_says_what_was_waited_for() {
        for blocks in [1, 4] {
            let mut grid = Grid::new(blocks, Schedule::RoundRobin).unwrap();
            let until = Until(Some(Instant::now() + std::time::Duration::from_millis(20)));
            let ended = grid
                .launch(&context(&until), &|block, _| {
                    let site = Site {
                        channel: 3,
                        ..Site::default()
                    };
                    wait_for(block, site, 9, || 4, |seen| seen == 9).map(drop)
                })
                .unwrap_err();
            assert_eq!(ended.stopped, Stopped::Deadline);
            let Waiting {
                site,
                expected,
                seen,
                ..
            } = ended.waiting;
            assert_eq!((site.channel, expected, seen), (3, 9, 4));
            // The grid is as good as new.
            chain(&mut grid, 16, &Until(None)).unwrap();
        }
    }

    #[test]
    fn a_panic_in_a_block_reaches_the_caller_and_ends_the_grid() {
        let mut grid = Grid::new(3, Schedule::RoundRobin).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = grid.launch(&context(&Until(None)), &|block, index| {
                assert_ne!(index, 2, "on purpose");
                wait_for(block, Site::default(), 1, || 0, |seen| seen == 1).map(drop)
            });
        }));
        assert!(panicked.is_err());
        let again = grid.launch(&context(&Until(None)), &|_, _| Ok(()));
        assert_eq!(again.unwrap_err().stopped, Stopped::Aborted);
    }
}
