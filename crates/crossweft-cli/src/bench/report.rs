//! Tables and JSON.

use std::fmt::Write as _;

use crossweft_collective::{Collective, Communicator};
use crossweft_hal::Device;
use serde::Serialize;

use super::options::{Bench, Kind, Timing};
use crate::values::Buffers;

/// What was timed, in microseconds.
pub(crate) struct Times {
    /// Calls.
    pub(crate) calls: Vec<f64>,
    /// Beside those, calls in a graph by the device's clock.
    pub(crate) graph: Vec<f64>,
}

impl Times {
    /// Of calls alone.
    pub(crate) fn of(calls: Vec<f64>) -> Self {
        let graph = Vec::new();
        Self { calls, graph }
    }
}

/// One size's result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// Size of the larger of input and output.
    pub(crate) bytes: u64,
    /// Elements of a message, which is one block of them.
    pub(crate) count: u64,
    /// Tokens, where elements are those of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokens: Option<u64>,
    /// Their type.
    pub(crate) dtype: &'static str,
    /// The reduce operation, or `none`.
    pub(crate) op: &'static str,
    /// The algorithm chosen.
    pub(crate) algorithm: String,
    /// Timed calls.
    pub(crate) iterations: usize,
    /// Mean time of a call, in microseconds, of the slowest rank each time.
    pub(crate) time_us_mean: f64,
    /// The same, median.
    pub(crate) time_us_p50: f64,
    /// The same, least.
    pub(crate) time_us_min: f64,
    /// On a GPU: the device's time of a call in a graph of many, in microseconds, of the slowest rank;
    /// median over the replays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) graph_us_p50: Option<f64>,
    /// The same, least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) graph_us_min: Option<f64>,
    /// Bytes by median time, of the graph if there is one.
    pub(crate) algbw_gbs: f64,
    /// Bytes that a link must carry by median time, whatever the algorithm: that times [`bus_factor`].
    pub(crate) busbw_gbs: f64,
    /// Wrong elements over all ranks, of exact and of random inputs; differing bits count too.
    pub(crate) wrong: u64,
}

impl Row {
    /// A row from the times of each call in microseconds.
    pub(crate) fn new(
        options: &Bench,
        world_size: u32,
        bytes: u64,
        algorithm: String,
        times: Times,
        wrong: u64,
    ) -> Self {
        let Times {
            calls: mut times,
            mut graph,
        } = times;
        graph.sort_by(f64::total_cmp);
        let graph_us_p50 = graph.get(graph.len() / 2).copied();
        times.sort_by(f64::total_cmp);
        let p50 = times.get(times.len() / 2).copied().unwrap_or(0.0);
        let min = times.first().copied().unwrap_or(0.0);
        let mean = times.iter().sum::<f64>() / times.len().max(1) as f64;
        // Bytes per microsecond are MB/s.
        let typical = graph_us_p50.unwrap_or(p50);
        let algbw = if typical > 0.0 {
            bytes as f64 / typical / 1000.0
        } else {
            0.0
        };
        let dtype = options.common.dtype;
        Self {
            bytes,
            count: bytes / options.blocks(world_size).2 / dtype.size() as u64,
            tokens: options.token().map(|token| bytes / token),
            dtype: dtype.name(),
            op: options.op.map_or("none", |op| op.name()),
            algorithm,
            iterations: times.len(),
            time_us_mean: mean,
            time_us_p50: p50,
            time_us_min: min,
            graph_us_p50,
            graph_us_min: graph.first().copied(),
            algbw_gbs: algbw,
            busbw_gbs: algbw * bus_factor(options.collective, world_size),
            wrong,
        }
    }

    /// The row of the table.
    pub(crate) fn line(&self) -> String {
        let Self {
            bytes,
            count,
            dtype,
            op,
            algorithm,
            wrong,
            ..
        } = self;
        format!(
            "{bytes:>12} {count:>12} {dtype:>7} {op:>6} {:>10.2} {:>7.2} {:>7.2} {wrong:>7}  {algorithm:<16}{:>10.2} {:>10.2}",
            self.time_us_mean, self.algbw_gbs, self.busbw_gbs, self.time_us_p50, self.time_us_min
        ) + &match (self.graph_us_p50, self.graph_us_min) {
            (Some(p50), Some(min)) => format!(" {p50:>10.2} {min:>10.2}"),
            _ => String::new(),
        }
    }
}

/// What a link must carry of each byte of the larger of input and output, as nccl-tests counts it.
pub(super) fn bus_factor(collective: Collective, world_size: u32) -> f64 {
    let n = f64::from(world_size);
    match collective {
        Collective::AllReduce => 2.0 * (n - 1.0) / n,
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::AllToAll
        | Collective::Gather { .. }
        | Collective::Scatter { .. } => (n - 1.0) / n,
        _ => 1.0,
    }
}

/// The facts that hold for all rows.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Header {
    /// The collective, as programs spell it.
    pub(crate) collective: String,
    #[serde(skip)]
    measured: Collective,
    /// Its root, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) root: Option<u32>,
    /// Version of this program.
    pub(crate) version: &'static str,
    /// The device.
    pub(crate) device: &'static str,
    /// Number of ranks.
    pub(crate) ranks: u32,
    /// What they are.
    pub(crate) started_as: String,
    /// The processor, and how many of its cores are usable.
    pub(crate) machine: String,
    /// Whether the output is the input.
    pub(crate) in_place: bool,
    /// Whether the executor ran plans that have a kernel of their own, too.
    pub(crate) executor: bool,
    /// Pairs of input and output that took turns.
    pub(crate) rotate: u32,
    /// How much later than the others one rank came, in microseconds.
    pub(crate) skew_us: u64,
    /// What times are of: on a CPU of calls.
    pub(crate) timing: &'static str,
    /// Elements of a token, where they are normalised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hidden: Option<u32>,
    /// What normalised tokens are quantised with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) quantise: Option<&'static str>,
    /// Where buffers lie.
    pub(crate) buffers: &'static str,
    /// What was chosen, and why.
    pub(crate) chosen: String,
    /// Where choices come from.
    pub(crate) chosen_by: String,
}

impl Header {
    /// The facts of a run.
    pub(crate) fn new(
        options: &Bench,
        communicator: &Communicator,
        (started_as, machine): (&str, &str),
        chosen: String,
    ) -> Self {
        let norm = match options.kind {
            Kind::Fused(norm) => Some(norm),
            _ => None,
        };
        let on_cpu = matches!(communicator.device(), Device::Cpu);
        Self {
            collective: match norm {
                Some(_) => "all_reduce_rms_norm".to_owned(),
                None => options.collective.name().replace('-', "_"),
            },
            measured: options.collective,
            root: options.collective.root(),
            version: env!("CARGO_PKG_VERSION"),
            device: communicator.device().name(),
            ranks: communicator.world_size(),
            started_as: started_as.to_owned(),
            machine: machine.to_owned(),
            in_place: options.common.in_place,
            executor: options.common.executor,
            rotate: options.common.rotate,
            skew_us: options.common.skew,
            timing: if on_cpu {
                Timing::Eager
            } else {
                options.timing()
            }
            .name(),
            hidden: norm.map(|norm| norm.hidden),
            quantise: norm.map(|norm| norm.quantise.name()),
            buffers: match options.common.buffers {
                Buffers::Symmetric => "symmetric",
                Buffers::Private => "private",
            },
            chosen,
            chosen_by: communicator.selection().source().to_owned(),
        }
    }

    /// The collective.
    pub(super) fn measured(&self) -> Collective {
        self.measured
    }

    /// The lines above the table.
    pub(crate) fn lines(&self) -> String {
        let Self {
            ranks,
            started_as,
            device,
            buffers,
            chosen,
            chosen_by,
            machine,
            version,
            ..
        } = self;
        let place = if self.in_place {
            "in place"
        } else {
            "out of place"
        };
        let root = self
            .root
            .map_or_else(String::new, |root| format!(" (root {root})"));
        let mut notes = String::new();
        if self.executor {
            notes.push_str(", by the executor");
        }
        if self.rotate > 1 {
            let _ = write!(notes, ", {} pairs in turn", self.rotate);
        }
        if self.skew_us > 0 {
            let _ = write!(notes, ", one rank {} us late", self.skew_us);
        }
        if let (Some(hidden), Some(quantise)) = (self.hidden, self.quantise) {
            let _ = write!(notes, ", tokens of {hidden}, quantised: {quantise}");
        }
        if self.timing == Timing::Graph.name() || self.timing == Timing::Device.name() {
            let _ = write!(notes, ", times of calls in graphs ({} clock)", self.timing);
        }
        let mut text = String::new();
        let graph = match *device {
            "cuda" if self.timing == Timing::Both.name() => {
                [" graph p50  graph min", "       (us)       (us)"]
            }
            _ => ["", ""],
        };
        let _ = writeln!(
            text,
            "# crossweft {version} {}{root}: {ranks} ranks ({started_as}) on {device}, {buffers} buffers, {place}{notes}",
            self.collective.replace('_', "-")
        );
        let _ = writeln!(text, "# machine: {machine}");
        let _ = writeln!(text, "# chosen: {chosen}");
        let _ = writeln!(text, "# chosen by {chosen_by}");
        let _ = writeln!(
            text,
            "#{:>11} {:>12} {:>7} {:>6} {:>10} {:>7} {:>7} {:>7}  {:<16}{:>10} {:>10}",
            "size",
            "count",
            "type",
            "redop",
            "time",
            "algbw",
            "busbw",
            "#wrong",
            "algorithm",
            "p50",
            "min"
        );
        text.insert_str(text.len() - 1, graph[0]);
        let _ = write!(
            text,
            "#{:>11} {:>12} {:>7} {:>5} {:>10} {:>7} {:>7} {:>7}  {:<16}{:>10} {:>10}",
            "(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "", "", "(us)", "(us)"
        );
        text += graph[1];
        text
    }
}

/// The JSON object.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// What holds for all rows.
    #[serde(flatten)]
    pub(crate) header: Header,
    /// One for each size.
    pub(crate) rows: Vec<Row>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_carry_what_nccl_tests_says() {
        for (collective, expected) in [
            (Collective::AllReduce, 1.5),
            (Collective::AllGather, 0.75),
            (Collective::ReduceScatter, 0.75),
            (Collective::AllToAll, 0.75),
            (Collective::Gather { root: 1 }, 0.75),
            (Collective::Scatter { root: 1 }, 0.75),
            (Collective::Broadcast { root: 1 }, 1.0),
            (Collective::Reduce { root: 1 }, 1.0),
        ] {
            assert!(
                (bus_factor(collective, 4) - expected).abs() < 1e-12,
                "{collective:?}"
            );
        }
    }
}
