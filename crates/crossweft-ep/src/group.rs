//! What `ncclEpGroup_t` stands for.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossweft_channel::Endpoint;
use crossweft_moe::{Group as Moe, GroupOptions};
use crossweft_net::{Group as Job, JoinOptions, Rendezvous, RendezvousOptions, UniqueId};

use crate::config::{Algorithm, GroupConfig};
use crate::nccl::Communicator;
use crate::settings;
use crate::status::{Error, Status};
use crate::tensor::token_type;

/// The most experts of a token.
const MAX_TOP_K: u32 = 32;

/// What a dispatch needs memory of its own for. All ranks have the same in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shape {
    pub(crate) hidden: u32,
    /// `ncclDataType_t` of what is combined.
    pub(crate) datatype: i32,
    pub(crate) top_k: u32,
}

/// One rank's part of a group.
#[derive(Debug)]
pub(crate) struct Group {
    comm: Communicator,
    endpoint: Arc<Endpoint>,
    /// Which process has made it.
    process: u32,
    pub(crate) algorithm: Algorithm,
    pub(crate) experts: u32,
    pub(crate) max_tokens: u32,
    max_token_bytes: u32,
    /// The most experts of a token, if it was said.
    top_k: Option<u32>,
    masking: bool,
    timeout: Duration,
    /// What dispatches have needed so far.
    shapes: Mutex<BTreeMap<Shape, Arc<Moe>>>,
    /// Ranks that are left out. Locked after `shapes`.
    masked: Mutex<Vec<bool>>,
    /// Whether one was because it was gone or late.
    has_lost: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one assignment or insertion.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What ranks exchange by the communicator: something that is not zero, then a unique id, of rank 0.
const MARK: [u8; 8] = *b"cw ep 2\n";

/// Joins the ranks of `comm` anew, over a socket of the host. Collective.
fn join(comm: &Communicator, (rank, ranks): (u32, u32), timeout: Duration) -> Result<Job, Error> {
    let deadline = Instant::now() + timeout;
    let mut payload = [0; 8 + 128];
    payload[..8].copy_from_slice(&MARK);
    // Whatever happens here, the others wait for this rank's part.
    let rendezvous = (rank == 0).then(|| {
        Rendezvous::start(&RendezvousOptions {
            // It ends sooner than joining: it alone knows who never came.
            timeout: timeout.mul_f64(0.9),
            ..RendezvousOptions::default()
        })
    });
    if let Some(Ok(rendezvous)) = &rendezvous {
        payload[8..].copy_from_slice(&rendezvous.unique_id().to_bytes());
    }
    let all = comm.all_gather(&payload, (rank, ranks), deadline)?;
    let rendezvous = rendezvous.transpose()?;
    let mut id = [0; 128];
    id.copy_from_slice(&all[8..8 + 128]);
    if id == [0; 128] {
        return Err(Error::new(
            Status::Remote,
            "rank 0 cannot listen for the others; see its own error",
        ));
    }
    let options = JoinOptions {
        timeout,
        ..JoinOptions::default()
    };
    let job = Job::join(&UniqueId::from_bytes(&id)?, rank, ranks, &options)?;
    drop(rendezvous);
    Ok(job)
}

impl Group {
    /// Of all ranks of `comm`. Collective; blocks until all have called it, also those that have nothing to make it with.
    pub(crate) fn new(
        comm: Communicator,
        config: Result<GroupConfig, Error>,
    ) -> Result<Arc<Self>, Error> {
        let (rank, ranks) = comm.ranks()?;
        let checked = config.and_then(|config| {
            check(&config, ranks).map_err(Error::argument)?;
            Ok((config, settings::timeout(config.timeout_ns)?))
        });
        let timeout = checked
            .as_ref()
            .map_or(settings::TIMEOUT, |(_, timeout)| *timeout);
        let deadline = Instant::now() + timeout;
        let endpoint = Endpoint::new(Arc::new(join(&comm, (rank, ranks), timeout)?), deadline)?;
        let what = "creating a group for a mixture of experts";
        let (config, timeout) = endpoint.settle(checked, what, deadline, Error::from)?;
        let algorithm = match config.algorithm {
            0 => Algorithm::LowLatency,
            _ => Algorithm::HighThroughput,
        };
        let GroupConfig {
            experts,
            max_dispatch_tokens,
            max_recv_tokens,
            top_k,
            ..
        } = config;
        let statement = format!(
            "{algorithm:?}, {experts} experts, up to {max_dispatch_tokens} tokens a rank, to receive {max_recv_tokens}, \
             top-{top_k}"
        );
        endpoint.agree(&statement, what, deadline)?;
        Ok(Arc::new(Self {
            comm,
            endpoint,
            process: std::process::id(),
            algorithm,
            experts,
            max_tokens: max_dispatch_tokens,
            max_token_bytes: config.max_token_bytes,
            top_k: (top_k > 0).then_some(top_k),
            masking: config.enable_mask != 0,
            timeout,
            shapes: Mutex::default(),
            masked: Mutex::new(vec![false; ranks as usize]),
            has_lost: AtomicBool::new(false),
        }))
    }

    /// Refuses to be ended by a process that was forked from the one that has made it, whose threads it has not.
    pub(crate) fn is_of_this_process(&self) -> Result<(), Error> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(Error::usage(format!(
                "process {} has made the group, and this one was only forked from it: leave it to that one",
                self.process
            ))),
        }
    }

    pub(crate) fn comm(&self) -> &Communicator {
        &self.comm
    }

    pub(crate) fn rank(&self) -> u32 {
        self.endpoint.rank()
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.endpoint.world_size()
    }

    /// Experts of each rank.
    pub(crate) fn local_experts(&self) -> u32 {
        self.experts / self.ranks()
    }

    /// Whether tokens can have so many experts.
    pub(crate) fn check_top_k(&self, top_k: usize) -> Result<u32, Error> {
        let most = self.top_k.unwrap_or(MAX_TOP_K).min(MAX_TOP_K);
        let found = u32::try_from(top_k).ok().filter(|k| (1..=most).contains(k));
        found.ok_or_else(|| Error::argument(format!("top-{top_k}; it can be 1 to {most}")))
    }

    /// Every rank's payload. Collective; blocks.
    pub(crate) fn all_gather(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let deadline = Instant::now() + self.timeout;
        Ok(self.endpoint.group().all_gather(payload, deadline)?)
    }

    /// What dispatches of `shape` run on. Collective the first time.
    pub(crate) fn of_shape(&self, shape: Shape) -> Result<Arc<Moe>, Error> {
        let mut shapes = lock(&self.shapes);
        if let Some(moe) = shapes.get(&shape) {
            return Ok(Arc::clone(moe));
        }
        let dtype = token_type(shape.datatype)
            .ok_or_else(|| Error::argument("tokens must be bf16, f16 or f32"))?;
        let bytes = u64::from(shape.hidden) * dtype.size() as u64;
        if bytes > self.max_token_bytes.into() {
            return Err(Error::argument(format!(
                "tokens have {bytes} bytes, but the group's max_token_bytes is {}",
                self.max_token_bytes
            )));
        }
        let mut options =
            GroupOptions::new(self.experts, self.max_tokens, shape.hidden, shape.top_k);
        options.dtype = dtype;
        options.timeout = self.timeout;
        options.masking = self.masking;
        let moe = Moe::new(&self.endpoint, options, Instant::now() + self.timeout)?;
        for (rank, _) in (0..)
            .zip(lock(&self.masked).iter())
            .filter(|(_, masked)| **masked)
        {
            moe.set_masked(rank, true)?;
        }
        shapes.insert(shape, Arc::clone(&moe));
        Ok(moe)
    }

    fn check_masking(&self) -> Result<(), Error> {
        match self.masking {
            true => Ok(()),
            false => Err(Error::usage("the group was created without enable_mask")),
        }
    }

    /// Looks whom a call has left out.
    pub(crate) fn look(&self) {
        let shapes = lock(&self.shapes);
        let mut masked = lock(&self.masked);
        for moe in shapes.values() {
            for (known, now) in masked.iter_mut().zip(moe.masked()) {
                if now && !*known {
                    *known = true;
                    self.has_lost.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// For each rank whether it takes part.
    pub(crate) fn active(&self) -> Result<Vec<i32>, Error> {
        self.check_masking()?;
        let masked = lock(&self.masked);
        Ok(masked.iter().map(|masked| i32::from(!masked)).collect())
    }

    /// Says of each rank whether it takes part from now on.
    pub(crate) fn set_active(&self, active: &[i32]) -> Result<(), Error> {
        self.check_masking()?;
        let own = self.rank();
        if active.get(own as usize) == Some(&0) {
            return Err(Error::argument(format!("rank {own} cannot mask itself")));
        }
        let masked: Vec<bool> = active.iter().map(|active| *active == 0).collect();
        for moe in lock(&self.shapes).values() {
            for (rank, masked) in (0..).zip(&masked).filter(|(rank, _)| *rank != own) {
                moe.set_masked(rank, *masked)?;
            }
        }
        *lock(&self.masked) = masked;
        Ok(())
    }

    /// Whether a rank was left out because it was gone or late, since [`clear_error`](Self::clear_error).
    pub(crate) fn error(&self) -> Result<bool, Error> {
        self.check_masking()?;
        Ok(self.has_lost.load(Ordering::Relaxed))
    }

    pub(crate) fn clear_error(&self) -> Result<(), Error> {
        self.check_masking()?;
        self.has_lost.store(false, Ordering::Relaxed);
        Ok(())
    }
}

/// Says what cannot be.
fn check(config: &GroupConfig, ranks: u32) -> Result<(), String> {
    let GroupConfig {
        version,
        algorithm,
        experts,
        max_dispatch_tokens,
        max_recv_tokens,
        max_token_bytes,
        zero_copy,
        overflow,
        top_k,
        enable_mask,
        ..
    } = *config;
    let high = match algorithm {
        0 => false,
        1 => true,
        other => return Err(format!("algorithm is {other}")),
    };
    if !(1..=2).contains(&version) {
        return Err(format!(
            "version is {version}; this library has API 2, and knows 1"
        ));
    }
    if experts == 0 || !experts.is_multiple_of(ranks) {
        return Err(format!(
            "num_experts is {experts}; it must be a multiple of the {ranks} ranks"
        ));
    }
    if max_dispatch_tokens == 0 || max_token_bytes == 0 {
        return Err("max_dispatch_tokens_per_rank and max_token_bytes must be above 0".to_owned());
    }
    if high && max_recv_tokens != 0 && max_recv_tokens < max_dispatch_tokens {
        return Err(format!(
            "max_recv_tokens_per_rank is {max_recv_tokens}; it must be 0 or max_dispatch_tokens_per_rank at least"
        ));
    }
    match overflow {
        // Too little room is an error of the call.
        0 | 1 => {}
        2 => {
            return Err(
                "NCCL_EP_OVERFLOW_DROP is not supported: make as much room as recv_total_counter says"
                    .to_owned(),
            );
        }
        other => return Err(format!("overflow_policy is {other}")),
    }
    if zero_copy > 1 {
        return Err("zero_copy can be AUTO or OFF: tokens are copied once on each side".to_owned());
    }
    if top_k > MAX_TOP_K {
        return Err(format!(
            "num_topk is {top_k}; it can be {MAX_TOP_K} at most"
        ));
    }
    if high && enable_mask != 0 {
        return Err("enable_mask is for low latency".to_owned());
    }
    Ok(())
}
