//! `crossweft bench primitives`: what everything else is made of, between two GPUs.
//!
//! Both ranks are threads of this process, so it runs on one GPU too, where nothing crosses a link; the report says which.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use clap::Args;
use crossweft_collective::{
    CollectiveError, CollectiveOptions, Communicator, DataType, Devices, ExchangeOptions, ReduceOp,
};
use crossweft_executor::{Echo, ExchangeError, MOST, Mover, Primitives};
use crossweft_hal::cuda::Stream;
use crossweft_hal::{Device as Machine, HalError};
use serde::Serialize;

use crate::exit::Exit;
use crate::job::{self, JobError, JobOptions, Start};
use crate::values::Device;
use crate::{Format, print_line};

/// Options of `bench primitives`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// The device to run on: GPUs only. Two ranks take the first two, or share the first.
    #[arg(long, value_enum, default_value_t = Device::Cuda)]
    device: Device,
    /// Times to and fro of what is small.
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rounds: u32,
    /// Leave out copies of large sizes.
    #[arg(long)]
    quick: bool,
    /// Seconds that any measurement may take before it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 20,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// For people, or for programs.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    crossweft: &'static str,
    machine: String,
    /// Of rank 0 and of rank 1.
    devices: [String; 2],
    /// Between what.
    placement: &'static str,
    rows: Vec<Row>,
}

/// One measurement.
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    bytes: u64,
    blocks: u32,
    threads: u32,
    value: f64,
    unit: &'static str,
    /// What it should be: at most, of times; at least, of bandwidths.
    #[serde(skip_serializing_if = "Option::is_none")]
    goal: Option<f64>,
}

const US: &str = "us";
const GBS: &str = "GB/s";

/// Between two GPUs, what a goal is for.
const TWO: &str = "two GPUs, two threads of one process";
const ONE: &str = "ONE GPU, two threads of one process: nothing crosses a link";

/// Threads of a block that sends a handful of bytes, and of one that copies.
const FEW: u32 = 32;
const MANY: u32 = 384;

impl Report {
    fn render(&self) -> String {
        let mut text = format!(
            "crossweft {}: primitives between {}\n{}\nrank 0: {}\nrank 1: {}\n\n",
            self.crossweft, self.placement, self.machine, self.devices[0], self.devices[1]
        );
        let _ = writeln!(
            text,
            "{:<52} {:>10} {:>6} {:>7} {:>10}       {:>9}",
            "what", "bytes", "blocks", "threads", "", "goal"
        );
        for row in &self.rows {
            let goal = row.goal.map_or_else(String::new, |goal| {
                let sign = if row.unit == US { "<=" } else { ">=" };
                format!("{sign} {goal}")
            });
            let _ = writeln!(
                text,
                "{:<52} {:>10} {:>6} {:>7} {:>10.2} {:<4}  {:>9}",
                row.what, row.bytes, row.blocks, row.threads, row.value, row.unit, goal
            );
        }
        text
    }
}

/// Runs the benchmark.
pub(crate) fn run(options: &Options) -> Exit {
    let machine = crate::doctor::machine_name();
    let result = find(options.device)
        .map_err(JobError::Usage)
        .and_then(|devices| {
            let job = JobOptions {
                start: Start::Threads,
                ..JobOptions::new(
                    Some(2),
                    true,
                    devices,
                    Duration::from_secs(options.timeout),
                    false,
                )
            };
            job::run(&job, |communicator, _| {
                measure(options, communicator, &machine)
            })
        });
    result.unwrap_or_else(|error| {
        crate::complain(&format!("error: {error}"));
        error.exit()
    })
}

fn find(device: Device) -> Result<Devices, String> {
    match device {
        Device::Cpu => Err("primitives are measured on GPUs: use --device cuda".to_owned()),
        Device::Auto | Device::Cuda => {
            Devices::cuda().map_err(|error| format!("primitives are measured on GPUs: {error}"))
        }
    }
}

fn measure(
    options: &Options,
    communicator: &Communicator,
    machine: &str,
) -> Result<u64, CollectiveError> {
    let limit = Duration::from_secs(options.timeout);
    let deadline = || Instant::now() + limit;
    let endpoint = communicator.endpoint();
    let primitives = Primitives::prepare(endpoint, limit, deadline())?;
    let is_two = !primitives.is_alone();
    let mut rows = Rows {
        primitives: &primitives,
        rounds: options.rounds,
        is_two,
        rows: Vec::new(),
    };
    rows.latencies()?;
    rows.bandwidths(options.quick)?;
    rows.host(communicator)?;
    let name = device_name(communicator)?;
    let names = endpoint.exchange(&name, "naming devices", deadline());
    let mut names = names.map_err(ExchangeError::from)?.into_iter();
    let report = Report {
        crossweft: env!("CARGO_PKG_VERSION"),
        machine: machine.to_owned(),
        devices: [(); 2].map(|()| names.next().unwrap_or_default()),
        placement: if is_two { TWO } else { ONE },
        rows: rows.rows,
    };
    if communicator.rank() == 0 {
        let printed = print_line(&match options.format {
            Format::Table => report.render(),
            Format::Json => serde_json::to_string_pretty(&report).unwrap_or_default(),
        });
        printed.map_err(|reason| CollectiveError::Usage { rank: 0, reason })?;
    }
    // What is wrong ends a measurement.
    Ok(0)
}

fn device_name(communicator: &Communicator) -> Result<String, CollectiveError> {
    match communicator.device() {
        Machine::Cuda(context) => {
            let properties = context.device().properties().map_err(HalError::from);
            let name = properties.map_err(ExchangeError::from)?.name;
            Ok(format!("cuda:{} ({name})", context.ordinal()))
        }
        _ => Ok("cpu".to_owned()),
    }
}

struct Rows<'a> {
    primitives: &'a Primitives,
    rounds: u32,
    is_two: bool,
    rows: Vec<Row>,
}

impl Rows<'_> {
    fn push(
        &mut self,
        what: &'static str,
        (bytes, blocks, threads): (u64, u32, u32),
        value: f64,
        unit: &'static str,
        goal: Option<f64>,
    ) {
        self.rows.push(Row {
            what,
            bytes,
            blocks,
            threads,
            value,
            unit,
            // A goal is for a link.
            goal: goal.filter(|_| self.is_two),
        });
    }

    /// One way of something, in microseconds.
    fn one_way(
        &mut self,
        what: &'static str,
        (echo, bytes, threads): (Echo, u64, u32),
        rounds: u32,
        goal: Option<f64>,
    ) -> Result<f64, CollectiveError> {
        let took = self.primitives.one_way(echo, bytes, threads, rounds)?;
        let us = took.as_secs_f64() * 1e6;
        self.push(what, (bytes, 1, threads), us, US, goal);
        Ok(us)
    }

    fn latencies(&mut self) -> Result<(), CollectiveError> {
        let rounds = self.rounds;
        self.one_way(
            "flag one way, relaxed",
            (Echo::Relaxed, 0, FEW),
            rounds,
            None,
        )?;
        self.one_way(
            "flag one way, release and acquire",
            (Echo::Acquire, 0, FEW),
            rounds,
            None,
        )?;
        let put = "put, signal, wait: one way";
        self.one_way(put, (Echo::PutSignalWait, 16, FEW), rounds, Some(1.2))?;
        for bytes in [1 << 10, 16 << 10] {
            self.one_way(put, (Echo::PutSignalWait, bytes, MANY), rounds, None)?;
        }
        let lines = self.primitives.keeps_lines();
        for (what, echo) in [
            ("packets of 8 bytes (LL8), one way", Echo::Packets8),
            ("packets in pairs (LL16), one way", Echo::Packets16),
            ("lines (LL128), one way", Echo::Lines),
        ] {
            if echo != Echo::Lines || lines {
                self.one_way(what, (echo, 16, FEW), rounds, None)?;
                self.one_way(what, (echo, 1 << 10, MANY), rounds, None)?;
                self.one_way(what, (echo, 16 << 10, MANY), rounds, None)?;
            }
        }
        let get = "get";
        self.one_way(get, (Echo::Get, 16, FEW), rounds, None)?;
        self.one_way(get, (Echo::Get, 16 << 10, MANY), rounds, None)?;
        let port = "port channel, put with signal: one way";
        let slow = (rounds / 10).max(1);
        self.one_way(port, (Echo::Port, 1 << 10, FEW), slow, Some(8.0))?;
        Ok(())
    }

    fn bandwidths(&mut self, quick: bool) -> Result<(), CollectiveError> {
        let sizes: &[u64] = if quick {
            &[1 << 20]
        } else {
            &[1 << 20, 64 << 20]
        };
        for &bytes in sizes {
            for (what, mover) in [
                ("put by threads", Mover::Put),
                ("get by threads", Mover::Get),
                (
                    "put in bulk (copy engine of a multiprocessor)",
                    Mover::BulkPut,
                ),
            ] {
                for blocks in [1, 2, 4, 8, 16, 32, 64, 128] {
                    let speed = self.primitives.bandwidth(mover, bytes, blocks, 10)?;
                    if let Some(speed) = speed {
                        self.push(what, (bytes, blocks, MANY), speed, GBS, None);
                    }
                }
            }
        }
        if !quick {
            let what = "port channel, puts with signals, one after another";
            let speed = self.primitives.port_bandwidth(MOST, 8)?;
            self.push(what, (MOST, 1, FEW), speed, GBS, Some(385.0));
        }
        Ok(())
    }

    /// What calls cost the host that launches them.
    fn host(&mut self, communicator: &Communicator) -> Result<(), CollectiveError> {
        let took = self.primitives.launch_cost(200)?;
        self.host_row("host: a launch", 16, took);
        let (bytes, calls) = (1 << 10, 200);
        let buffer = communicator.allocate(2 * bytes)?;
        let options = CollectiveOptions::new(DataType::Bf16, ReduceOp::Sum, bytes);
        let mut options = options.symmetric(&buffer, &buffer);
        options.in_place = Some(true);
        let prepared = communicator.all_reduce(options)?;
        let (plan, _) = prepared.select(bytes)?;
        let took = self.primitives.call_cost(plan, bytes, calls)?;
        self.host_row("host: an eager all-reduce", bytes, took);
        let Machine::Cuda(context) = communicator.device() else {
            return Ok(());
        };
        let stream = Stream::new(context).map_err(HalError::from);
        let stream = stream.map_err(ExchangeError::from)?;
        let exchange = communicator.exchange(&ExchangeOptions::default().symmetric(&buffer))?;
        let peer = 1 - communicator.rank();
        let call = || {
            let mut group = exchange.group();
            group.send_symmetric(peer, DataType::U8, &buffer, 0..bytes);
            group.recv_symmetric(peer, DataType::U8, &buffer, bytes..2 * bytes);
            group.run_on(&stream)
        };
        let wait = || {
            let waited = stream.synchronize(Instant::now() + communicator.timeout());
            waited.map_err(|error| ExchangeError::from(HalError::from(error)))?;
            exchange.check()
        };
        call()?;
        wait()?;
        let started = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        let took = started.elapsed() / calls;
        wait()?;
        self.host_row("host: an eager send and receive", bytes, took);
        Ok(())
    }

    fn host_row(&mut self, what: &'static str, bytes: u64, took: Duration) {
        let us = took.as_secs_f64() * 1e6;
        self.push(what, (bytes, 1, MANY), us, US, None);
    }
}
