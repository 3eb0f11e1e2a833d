//! `tqc bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::model::folder;
use super::{CliError, Common, Cores, print};
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::bench::factor::{FactorBench, FactorReport, factor};
use crate::bench::linear::{LinearBench, LinearReport, linear};
use crate::bench::model::{self, ModelBench, ModelReport};
use crate::bench::rotate::{RotateBench, rotate};
use crate::bench::trellis::{TrellisBench, TrellisReport, trellis};
use crate::bench::{EncodeBench, EncodeReport, encode};
use crate::codec::CodecSpec;
use crate::codec::trellis::Code;
use crate::failure::{Exit, Outcome};
use crate::isa::Isa;
use crate::runtime::Weights;

/// Measure parts of the program against the machine.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    Encode(EncodeArgs),
    Linear(LinearArgs),
    Decode(DecodeArgs),
    Prefill(PrefillArgs),
    Stream(StreamArgs),
    Rotate(RotateArgs),
    Factor(FactorArgs),
    Trellis(TrellisArgs),
}

/// Weights encoded per second, for every codec and encoder, beside a copy of the same bytes.
#[derive(Debug, Args)]
struct EncodeArgs {
    /// Only codecs whose names contain this, such as `affine-4` or `mxfp`.
    #[arg(long, value_name = "TEXT", default_value = "")]
    codec: String,
    /// Threads [default: all the machine has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Instruction set of the kernels: scalar, avx2, avx512 or neon [default: the best here].
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
    #[command(flatten)]
    common: Common,
}

/// Weights multiplied per second by linear layers, for every codec and path, beside what memory allows.
#[derive(Debug, Args)]
struct LinearArgs {
    /// Only codecs whose names contain this, such as `affine-4` or `mxfp`.
    #[arg(long, value_name = "TEXT", default_value = "")]
    codec: String,
    /// Outputs of the layer.
    #[arg(long, value_name = "N", default_value_t = 5120, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    out_features: u32,
    /// Inputs of the layer.
    #[arg(long, value_name = "N", default_value_t = 5120, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    in_features: u32,
    /// Rows of activations: 1 as in decoding, many as in reading a prompt.
    #[arg(
        long,
        value_name = "N,N,...",
        value_delimiter = ',',
        default_values_t = [1, 512],
        value_parser = clap::value_parser!(u32).range(1..=4096)
    )]
    rows: Vec<u32>,
    /// Threads [default: all the machine has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Instruction set of the kernels: scalar, avx2, avx512 or neon [default: the best here].
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
    #[command(flatten)]
    common: Common,
}

/// Tokens decoded per second, one at a time, beside what memory allows; and what the fast path costs in KL.
#[derive(Debug, Args)]
struct DecodeArgs {
    #[command(flatten)]
    model: ModelBenchArgs,
    /// Tokens of a run.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(8..=65536))]
    tokens: u32,
}

/// Tokens of a prompt read per second; and what the fast path costs in KL.
#[derive(Debug, Args)]
struct PrefillArgs {
    #[command(flatten)]
    model: ModelBenchArgs,
    /// Tokens of a run.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(8..=65536))]
    tokens: u32,
}

#[derive(Debug, Args)]
struct ModelBenchArgs {
    /// A model: a folder, or `hub:ORG/NAME@COMMIT`.
    model: String,
    /// Numbers of threads [default: 1 and all the machine has].
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Only this path: exact or fast [default: both].
    #[arg(long, value_name = "PATH", value_parser = ["exact", "fast"])]
    path: Option<String>,
    /// Runs of each measurement; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=100))]
    runs: u8,
    /// Instruction set of the kernels: scalar, avx2, avx512 or neon [default: the best here].
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
    #[command(flatten)]
    common: Common,
}

/// A batch that goes through a model layer by layer: time of each layer, peak memory, time for all of them.
#[derive(Debug, Args)]
struct StreamArgs {
    /// A model: a folder, or `hub:ORG/NAME@COMMIT`.
    model: String,
    /// Sequences in the batch.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    rows: u16,
    /// Tokens of each.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    context: u32,
    /// First layer.
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: usize,
    /// Layers to run [default: all from there].
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Threads [default: all the machine has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Instruction set of the kernels: scalar, avx2, avx512 or neon [default: the best here].
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
    #[command(flatten)]
    common: Common,
}

impl BenchArgs {
    pub fn run(self) -> Outcome<Exit> {
        match self.what {
            Bench::Encode(args) => args.run(),
            Bench::Linear(args) => args.run(),
            Bench::Decode(args) => args.model.run(args.tokens, &model::decode),
            Bench::Prefill(args) => args.model.run(args.tokens, &model::prefill),
            Bench::Stream(args) => args.run(),
            Bench::Rotate(args) => args.run(),
            Bench::Factor(args) => args.run(),
            Bench::Trellis(args) => args.run(),
        }
    }
}

type Measure = dyn Fn(&dyn Fn() -> Outcome<Weights>, &ModelBench) -> Outcome<ModelReport>;

impl ModelBenchArgs {
    fn run(self, tokens: u32, measure: &Measure) -> Outcome<Exit> {
        let dir: PathBuf = folder(&self.model, true)?;
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut threads: Vec<usize> = self.threads.iter().copied().map(usize::from).collect();
        if threads.is_empty() {
            threads = if all > 1 { vec![1, all] } else { vec![1] };
        }
        let precisions = match self.path.as_deref() {
            Some("exact") => vec![Precision::Exact],
            Some(_) => vec![Precision::Fast],
            None => vec![Precision::Exact, Precision::Fast],
        };
        let isa = self.isa.unwrap_or_else(Isa::best);
        let tokens = tokens as usize;
        let bench = ModelBench { threads, isa, tokens, runs: usize::from(self.runs), precisions };
        let report = measure(&|| Weights::open(&dir), &bench)?;
        print::result(self.common.json, &report, model_text)?;
        Ok(Exit::Done)
    }
}

fn model_text(report: &ModelReport) -> String {
    let columns = [
        ("path", false),
        ("threads", true),
        ("tokens/s", true),
        ("weights GB/s", true),
        ("of read rate", true),
    ];
    let mut table = print::Table::new(&columns);
    for row in &report.rows {
        table.row([
            row.path.to_string(),
            row.threads.to_string(),
            format!("{:.1}", row.tokens_per_s),
            format!("{:.2}", row.weights_gb_per_s),
            format!("{:.0} %", 100.0 * row.of_bandwidth),
        ]);
    }
    let rates: Vec<String> =
        report.read_gb_per_s.iter().map(|(threads, rate)| format!("{rate:.1} GB/s with {threads}")).collect();
    let mut text = format!(
        "{} of weights a token, {} kernels; memory reads {}\n\n{}",
        crate::units::Bytes(report.bytes_per_token),
        report.isa,
        rates.join(", "),
        table.render()
    );
    if report.fast_layers + report.exact_layers > 0 {
        text.push_str(&format!(
            "\nfast path: {} linear layers with int8 activations, {} with f32\n",
            report.fast_layers, report.exact_layers
        ));
    }
    if let Some(d) = &report.fast_against_exact {
        text.push_str(&format!(
            "KL(exact || fast) over {} tokens: mean {:.2e} ± {:.1e} nats, largest {:.2e}; same likeliest token {:.1} %\n",
            d.tokens,
            d.mean_kl,
            1.96 * d.standard_error,
            d.max_kl,
            100.0 * d.top1_agreement
        ));
    }
    text
}

impl StreamArgs {
    fn run(self) -> Outcome<Exit> {
        let dir = folder(&self.model, true)?;
        let cores = Cores { threads: self.threads, isa: self.isa };
        let limits = cores.limits();
        let cpu = Cpu::new(limits.isa, limits.threads, Precision::Exact);
        let weights = Weights::open(&dir)?;
        let all = weights.decoder.layers.len();
        let layers = self.from..self.layers.map_or(all, |count| self.from.saturating_add(count));
        let batch = (usize::from(self.rows), self.context as usize);
        let report = model::stream(&weights, &cpu, batch, layers, &mut |layer, seconds| {
            print::say(&format!("layer {layer}: {seconds:.2} s"));
        })?;
        if self.common.json {
            print::json(&report)?;
            return Ok(Exit::Done);
        }
        print::text(&format!(
            "{} x {} tokens through {} of {} layers: {:.1} s, {:.0} GFLOP/s; all layers: {:.0} s\npeak memory {} resident (mapped pages included), {} anonymous\n",
            report.rows.0,
            report.rows.1,
            report.measured.len(),
            report.layers,
            report.measured.iter().map(|(_, s, _)| s).sum::<f64>(),
            report.gflops,
            report.projected_s,
            report.peak_resident,
            report.peak_anonymous,
        ))?;
        Ok(Exit::Done)
    }
}

/// Gigabytes of f32 weights that change their basis per second on one thread, beside a copy of the same bytes.
#[derive(Debug, Args)]
struct RotateArgs {
    /// Widths of the signed Hadamard rotation.
    #[arg(
        long,
        value_name = "N,N,...",
        value_delimiter = ',',
        default_values_t = [576, 896, 2048, 2560, 4096, 5120],
        value_parser = clap::value_parser!(u32).range(2..=1 << 16)
    )]
    width: Vec<u32>,
    /// Passes of each measurement; the median counts.
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u8).range(1..=100))]
    passes: u8,
    /// Instruction set of the kernels: scalar, avx2, avx512 or neon [default: the best here].
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
    #[command(flatten)]
    common: Common,
}

impl RotateArgs {
    fn run(self) -> Outcome<Exit> {
        let limits = Cores { threads: Some(1), isa: self.isa }.limits();
        let widths: Vec<usize> = self.width.iter().map(|width| *width as usize).collect();
        let report =
            rotate(&RotateBench { widths: widths.clone(), passes: self.passes.into(), isa: limits.isa });
        for width in widths.iter().filter(|width| !report.rates.iter().any(|rate| rate.width == **width)) {
            print::say(&format!("note: no Hadamard matrix of order {width} is known"));
        }
        if self.common.json {
            print::json(&report)?;
            return Ok(Exit::Done);
        }
        let mut table = print::Table::new(&[
            ("width", true),
            ("matrix", false),
            ("rows GB/s", true),
            ("columns GB/s", true),
            ("memcpy GB/s", true),
        ]);
        for rate in &report.rates {
            let factors =
                rate.factors.iter().map(u32::to_string).chain([format!("2^{}", rate.sylvester_log2)]);
            table.row([
                rate.width.to_string(),
                factors.collect::<Vec<_>>().join(" x "),
                format!("{:.2}", rate.rows_gb_per_s),
                format!("{:.2}", rate.columns_gb_per_s),
                format!("{:.2}", rate.memcpy_gb_per_s),
            ]);
        }
        print::text(&format!("1 thread, {} kernels\n\n{}", report.isa, table.render()))?;
        Ok(Exit::Done)
    }
}

/// Operations per second of a symmetric matrix's factorization and of its sums, beside products.
#[derive(Debug, Args)]
struct FactorArgs {
    /// Order of the matrix.
    #[arg(long, value_name = "N", default_value_t = 5120, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    n: u32,
    /// Runs of each measurement; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=100))]
    runs: u8,
    /// Also search 4-bit codes of a weight of so many rows under the matrix, once by `gptq` and once by `gptq-refit`.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    rows: u32,
    #[command(flatten)]
    cores: Cores,
    #[command(flatten)]
    common: Common,
}

impl FactorArgs {
    fn run(self) -> Outcome<Exit> {
        let limits = self.cores.limits();
        let report = factor(&FactorBench {
            n: self.n as usize,
            threads: limits.threads,
            isa: limits.isa,
            runs: self.runs.into(),
            rows: self.rows as usize,
        })?;
        print::result(self.common.json, &report, factor_text)?;
        Ok(Exit::Done)
    }
}

fn factor_text(report: &FactorReport) -> String {
    let mut table = print::Table::new(&[("work", false), ("GFLOP/s", true)]);
    for (work, rate) in [
        ("products of f32", report.products_gflop_per_s),
        ("sums of products", report.sums_gflop_per_s),
        ("factorization", report.factor_gflop_per_s),
    ] {
        table.row([work.to_owned(), format!("{rate:.1}")]);
    }
    let searched = report.gptq.as_ref().map_or_else(String::new, |gptq| {
        format!(
            "\n{} rows: gptq {:.1} s, gptq-refit {:.1} s; at the products' rate the least is {:.1} s\n",
            gptq.rows, gptq.gptq_s, gptq.gptq_refit_s, gptq.floor_s
        )
    });
    format!(
        "order {}, {} threads, {} kernels; a factorization takes {:.3} s, {:.0} % of the products' rate\n\n{}{searched}",
        report.n,
        report.threads,
        report.isa,
        report.factor_s,
        100.0 * report.of_products,
        table.render()
    )
}

/// Weights searched per second by the trellis encoder, on each instruction set beside the scalar one; and errors.
#[derive(Debug, Args)]
struct TrellisArgs {
    /// Bits of a weight: k.
    #[arg(
        long,
        value_name = "K,K,...",
        value_delimiter = ',',
        default_values_t = [2, 3, 4],
        value_parser = clap::value_parser!(u32).range(1..=4)
    )]
    bits: Vec<u32>,
    /// Bits of a state: L.
    #[arg(
        long,
        value_name = "L,L,...",
        value_delimiter = ',',
        default_values_t = [12],
        value_parser = clap::value_parser!(u32).range(10..=16)
    )]
    states: Vec<u32>,
    /// Codes: 1mad, bs12, mul1, 3inst, mcg, rptc or random.
    #[arg(long, value_name = "NAME,NAME,...", value_delimiter = ',', default_values_t = [Code::Bs12])]
    code: Vec<Code>,
    /// Also measure errors of Gaussian weights, as they are and at the code's scale, beside the least possible.
    #[arg(long)]
    mse: bool,
    /// Tiles of 256 weights, over all threads.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    tiles: u32,
    /// Weights to each side of the seam in the first pass.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=128))]
    window: u32,
    /// Threads that search at once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Only this instruction set beside scalar: avx2, avx512 or neon [default: all that run here].
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
    #[command(flatten)]
    common: Common,
}

impl TrellisArgs {
    fn run(self) -> Outcome<Exit> {
        let report = trellis(&TrellisBench {
            codes: self.code,
            bits: self.bits,
            states: self.states,
            window: Some(self.window as usize),
            tiles: self.tiles as usize,
            threads: self.threads.into(),
            isas: self.isa.map_or_else(Isa::available, |isa| vec![isa]),
            mse: self.mse,
        })?;
        print::result(self.common.json, &report, trellis_text)?;
        Ok(Exit::Done)
    }
}

fn trellis_text(report: &TrellisReport) -> String {
    let mut table = print::Table::new(&[
        ("code", false),
        ("L", true),
        ("k", true),
        ("kernels", false),
        ("Mweights/s", true),
        ("of scalar", true),
    ]);
    let mut errors = print::Table::new(&[
        ("code", false),
        ("L", true),
        ("k", true),
        ("bound", true),
        ("at scale 1", true),
        ("±", true),
        ("g", true),
        ("at scale g", true),
        ("±", true),
        ("saturated", true),
    ]);
    for trellis in &report.trellises {
        let name = [trellis.code.clone(), trellis.states.to_string(), trellis.bits.to_string()];
        for rate in &trellis.rates {
            let rates =
                [rate.isa.clone(), format!("{:.3}", rate.mweights_per_s), format!("{:.1} x", rate.of_scalar)];
            table.row(name.iter().cloned().chain(rates));
        }
        if let Some(mse) = &trellis.mse {
            let columns = [
                format!("{:.5}", mse.bound),
                format!("{:.5}", mse.plain),
                format!("{:.5}", mse.plain_standard_error),
                format!("{:.2}", trellis.scale),
                format!("{:.5}", mse.scaled),
                format!("{:.5}", mse.scaled_standard_error),
                mse.saturated.to_string(),
            ];
            errors.row(name.iter().cloned().chain(columns));
        }
    }
    let mut text = format!(
        "{} tiles of {} weights, {} threads, {} weights to each side of the seam in the first pass\n\n{}",
        report.tiles,
        report.tile,
        report.threads,
        report.window,
        table.render()
    );
    if report.trellises.iter().any(|trellis| trellis.mse.is_some()) {
        text.push_str(
            "\nMean squared error of Gaussian weights of unit variance, and its standard error\n\n",
        );
        text.push_str(&errors.render());
    }
    text
}

impl EncodeArgs {
    fn run(self) -> Outcome<Exit> {
        let cores = Cores { threads: self.threads, isa: self.isa };
        let limits = cores.limits();
        some_codec(&self.codec)?;
        let bench = EncodeBench::new(limits.threads, limits.isa);
        let report = encode(&bench, |codec, _| codec.to_string().contains(&self.codec));
        print::result(self.common.json, &report, report_text)?;
        Ok(Exit::Done)
    }
}

/// Refuses a text that is in no codec's name.
fn some_codec(text: &str) -> Result<(), CliError> {
    if CodecSpec::all().iter().any(|codec| codec.to_string().contains(text)) {
        Ok(())
    } else {
        Err(CliError::NoSuchCodec { text: text.to_owned() })
    }
}

impl LinearArgs {
    fn run(self) -> Outcome<Exit> {
        let cores = Cores { threads: self.threads, isa: self.isa };
        let limits = cores.limits();
        some_codec(&self.codec)?;
        let bench = LinearBench {
            threads: limits.threads,
            isa: limits.isa,
            out_features: self.out_features as usize,
            in_features: self.in_features as usize,
            rows: self.rows.iter().map(|rows| *rows as usize).collect(),
            time: Duration::from_millis(300),
        };
        let report = linear(&bench, |codec| codec.to_string().contains(&self.codec))?;
        print::result(self.common.json, &report, linear_text)?;
        Ok(Exit::Done)
    }
}

fn linear_text(report: &LinearReport) -> String {
    let columns = [
        ("codec", false),
        ("path", false),
        ("rows", true),
        ("Gweights/s", true),
        ("weights GB/s", true),
        ("of read rate", true),
        ("GFLOP/s", true),
    ];
    let mut table = print::Table::new(&columns);
    for rate in &report.rates {
        table.row([
            rate.codec.clone(),
            rate.path.to_string(),
            rate.rows.to_string(),
            format!("{:.2}", rate.gweights_per_s),
            format!("{:.2}", rate.gb_per_s),
            format!("{:.0} %", 100.0 * rate.of_bandwidth),
            format!("{:.0}", rate.gflop_per_s),
        ]);
    }
    format!(
        "{} x {} weights, {} threads, {} kernels; memory reads {:.1} GB/s\n\n{}",
        report.out_features,
        report.in_features,
        report.threads,
        report.isa,
        report.read_gb_per_s,
        table.render()
    )
}

fn report_text(report: &EncodeReport) -> String {
    let mut table =
        print::Table::new(&[("codec", false), ("encoder", false), ("Mweights/s", true), ("of memcpy", true)]);
    for rate in &report.rates {
        table.row([
            rate.codec.clone(),
            rate.encoder.to_owned(),
            format!("{:.0}", rate.mweights_per_s),
            format!("{:.0} %", 100.0 * rate.of_memcpy),
        ]);
    }
    format!(
        "{} of bf16 source, {} threads, {} kernels; memcpy of the same bytes: {:.2} GB/s\n\n{}",
        report.source,
        report.threads,
        report.isa,
        report.memcpy_gb_per_s,
        table.render()
    )
}
