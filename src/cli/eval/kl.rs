//! `tqc eval kl`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::{BudgetArgs, DbArgs, PathArgs, Started, Steps, nats};
use crate::arch::Config;
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::calib::{Ngrams, Overlap};
use crate::cli::Common;
use crate::cli::generate::interrupt;
use crate::cli::model::ModelArgs;
use crate::cli::print::{self, Table};
use crate::digest::Digest;
use crate::eval::EvalError;
use crate::eval::db::{Document, Key};
use crate::eval::dump::{Dump, Speaker};
use crate::eval::identity::Identity;
use crate::eval::kl::layers::{LayerKl, layers};
use crate::eval::kl::run::{Timings, check};
use crate::eval::kl::summary::Bucket;
use crate::eval::kl::{Candidate, Scoring, Summary, VERSION, score, summarize};
use crate::failure::{Exit, Outcome};
use crate::process::PeakMemory;
use crate::runtime::{Model, Weights};
use crate::text::Tokenizer;

/// Divergence of a candidate from its teacher, position by position.
///
/// Mean KL(teacher || candidate) in nats per token, with a 95 % interval clustered by document. Every position goes
/// into the database; run again after an interruption, it goes on where it ended.
#[derive(Debug, Args)]
pub struct KlArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The teacher's dump: a folder of `tqc eval dump`, or a `_logits_` file of llama.cpp.
    #[arg(long, value_name = "DUMP")]
    teacher: PathBuf,
    /// The teacher's folder, whose head makes logits of the dump's hidden states [default: the folder that the
    /// dump was made from].
    #[arg(long, value_name = "DIR")]
    head: Option<PathBuf>,
    /// Token by token through caches and decode kernels, as when the model generates, instead of layer by layer.
    /// The whole model must fit in memory.
    #[arg(long)]
    decode: bool,
    /// Also measure after which layers the candidate leaves its teacher, on the first N sequences. Reads the
    /// teacher's folder.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    layers: Option<u32>,
    /// Show so many of the positions with the largest KL, in context.
    #[arg(long, value_name = "N", default_value_t = 0)]
    worst: usize,
    /// End with 1 if a logit is NaN or infinite. Without it only if no position is finite.
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    path: PathArgs,
    #[command(flatten)]
    budget: BudgetArgs,
    #[command(flatten)]
    db: DbArgs,
    #[command(flatten)]
    common: Common,
}

/// What is printed.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    summary: Summary,
    layers: Option<Vec<LayerKl>>,
    /// How much of the dump's text the candidate was calibrated on; null if it was not, or does not say.
    calibration_overlap: Option<Overlap>,
    model: Digest,
    dump: Digest,
    bits_per_weight: f64,
    run: i64,
    timings: Timings,
    tokens_per_s: f64,
    memory: PeakMemory,
}

impl KlArgs {
    pub fn run(self) -> Outcome<Exit> {
        let stop = interrupt(|| {})?;
        let dump = Dump::open(&self.teacher)?;
        let dir = self.model.folder()?;
        Config::read_packed(&dir)?;
        let weights = Weights::open(&dir)?;
        let identity = Identity::read(&dir)?;
        check(&dump, &weights, &identity)?;
        let cpu = self.model.cpu(self.path.precision());
        // Both are asked for before hours of work.
        let speaker = dump.speaker(self.head.as_deref(), &cpu)?;
        let teacher_dir = self.layers.map(|_| dump.teacher_dir(self.head.as_deref())).transpose()?;
        if let (Some(dir), Some(needed)) = (&teacher_dir, dump.record.teacher.digest) {
            let found = Identity::read(dir)?.digest;
            if found != needed {
                return Err(EvalError::OtherTeacher { found, needed }.into());
            }
        }

        let key = Key {
            instrument: "kl",
            version: VERSION,
            model: identity.digest,
            subject: json!({ "dump": dump.digest }),
            settings: json!({
                "path": if self.decode { "decode" } else { "streamed" },
                "precision": self.path.precision(),
            }),
        };
        let started = self.db.start(&key, &identity)?;
        let steps = Steps::new("kl");
        let measured =
            self.measure(&started, &speaker, &dir, weights, &cpu, teacher_dir.as_deref(), &steps, &stop);
        let (summary, layers, timings) = match measured {
            Ok(measured) => measured,
            Err(error) => return Err(started.failed(steps.seconds(), error)),
        };
        let mut memory = PeakMemory::default();
        memory.sample();
        let seconds = timings.layers_s + timings.heads_s + timings.divergence_s;
        let report = Report {
            tokens_per_s: if seconds > 0.0 { timings.positions as f64 / seconds } else { 0.0 },
            summary,
            layers,
            calibration_overlap: Ngrams::read(&dir)
                .map(|seen| seen.overlap(dump.sequences.iter().map(|sequence| sequence.tokens.as_slice()))),
            model: identity.digest,
            dump: dump.digest,
            bits_per_weight: identity.bits_per_weight,
            run: started.run.id,
            timings,
            memory,
        };
        let value = serde_json::to_value(&report).expect("a report is plain data");
        started.finish(&value, steps.seconds())?;
        steps.end();
        print::result(self.common.json, &report, |report| text(report, &identity))?;
        let (finite, spoilt) = (report.summary.tokens, report.summary.non_finite);
        if spoilt > 0 {
            print::say(&format!(
                "warning: {spoilt} of {} positions have logits that are not finite",
                finite + spoilt
            ));
        }
        Ok(if spoilt > 0 && (self.strict || finite == 0) { Exit::No } else { Exit::Done })
    }

    /// Scores what is not scored yet, and sums everything up.
    #[allow(clippy::too_many_arguments)] // what `run` has opened and checked
    fn measure(
        &self,
        started: &Started,
        speaker: &Speaker<'_>,
        dir: &Path,
        weights: Weights,
        cpu: &Arc<Cpu>,
        teacher_dir: Option<&Path>,
        steps: &Steps,
        stop: &AtomicBool,
    ) -> Outcome<(Summary, Option<Vec<LayerKl>>, Timings)> {
        let dump = speaker.dump;
        let mut documents = started.db.documents(started.run.id)?;
        documents.truncate(documents.iter().enumerate().take_while(|(i, d)| *i == d.sequence).count());
        if started.run.resumed {
            print::say(&format!(
                "going on with run {}: {} of {} sequences are scored",
                started.run.id,
                documents.len(),
                dump.sequences.len()
            ));
        }
        let candidate = match self.decode {
            true => Candidate::Decoding(Box::new(Model::new(weights, cpu.clone())?)),
            false => Candidate::Streamed(Box::new(weights), cpu.clone()),
        };
        let scoring = Scoring {
            speaker,
            budget: self.budget.memory,
            work: Some(&started.work),
            done: documents.len(),
            stop,
            progress: steps,
        };
        let timings = score(&candidate, &scoring, &mut |sequence, positions| {
            let document = dump.sequences[sequence].document;
            let document = Document { sequence, document, positions: positions.to_vec() };
            started.db.put_document(started.run.id, &document)?;
            documents.push(document);
            Ok(())
        })?;
        let layers = match (teacher_dir, self.layers) {
            (Some(teacher), Some(count)) => {
                let teacher = Weights::open(teacher)?;
                let sequences: Vec<Vec<u32>> =
                    dump.sequences.iter().take(count as usize).map(|s| s.tokens.clone()).collect();
                let cpu: Arc<_> = self.model.cpu(Precision::Exact);
                Some(layers(&teacher, &Weights::open(dir)?, &cpu, &sequences, stop, steps)?)
            }
            _ => None,
        };
        let sequences: Vec<_> = documents.into_iter().map(|document| document.positions).collect();
        let tokenizer = if self.worst > 0 { Tokenizer::open(dir).ok() } else { None };
        let summary = summarize(dump, &sequences, self.worst, tokenizer.as_ref())?;
        Ok((summary, layers, timings))
    }
}

fn text(report: &Report, identity: &Identity) -> String {
    let s = &report.summary;
    let interval = match s.ci95 {
        Some(ci) => format!("[{}, {}]", nats(ci.low), nats(ci.high)),
        None => "no interval: fewer than two documents".to_owned(),
    };
    let maybe = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), nats);
    let ppl = |ppl: Option<f64>| ppl.map_or_else(|| "-".to_owned(), |ppl| format!("{ppl:.4}"));
    let mut out = format!(
        "model         {} ({}, {:.3} bits per weight)\nmean KL       {} nats per token, 95 % {interval}\n\
         noise floor   {}\nmedian        {}   p90 {}   p99 {}   p99.9 {}   max {}\n\
         top-1         {} agree\nperplexity    {} (teacher {})\n\
         positions     {} in {} documents; {} not finite\n",
        identity.name,
        identity.digest.short(),
        identity.bits_per_weight,
        maybe(s.mean_kl),
        nats(s.noise_floor),
        maybe(s.median_kl),
        maybe(s.p90_kl),
        maybe(s.p99_kl),
        maybe(s.p999_kl),
        maybe(s.max_kl),
        s.top1_agreement.map_or_else(|| "-".to_owned(), |share| format!("{share:.4}")),
        ppl(s.candidate_ppl),
        ppl(s.teacher_ppl),
        s.tokens,
        s.documents,
        s.non_finite,
    );
    if let Some(overlap) = &report.calibration_overlap {
        out.push_str(&format!(
            "calibration   saw {} of {} runs of {} tokens, and all of {} of {} sequences\n",
            overlap.shared, overlap.runs, overlap.length, overlap.whole, overlap.sequences
        ));
    }
    let t = &report.timings;
    let seconds = t.layers_s + t.heads_s + t.divergence_s;
    if seconds > 0.0 {
        let share = |part: f64| 100.0 * part / seconds;
        out.push_str(&format!(
            "speed         {:.0} positions/s; {:.0} % in layers, {:.0} % in heads, {:.0} % in the divergence\n",
            report.tokens_per_s,
            share(t.layers_s),
            share(t.heads_s),
            share(t.divergence_s)
        ));
    }
    out.push_str(&buckets("teacher's confidence", &s.by_confidence));
    out.push_str(&buckets("position", &s.by_position));
    if let Some(layers) = &report.layers {
        let mut table = Table::new(&[("layers", true), ("mean KL", true), ("+-", true)]);
        for layer in layers {
            let error = layer.standard_error.map_or_else(String::new, nats);
            table.row([layer.layer.to_string(), maybe(layer.mean_kl), error]);
        }
        out.push_str(&format!("\n{}", table.render()));
    }
    for worst in &s.worst {
        out.push_str(&format!(
            "\n{} nats at token {} of document {} (line {}): teacher {:?} ({:.3}), candidate {:?}, text {:?}\n  {:?}\n",
            nats(worst.kl),
            worst.position,
            worst.document,
            worst.line,
            worst.teacher.0,
            worst.teacher.1,
            worst.candidate,
            worst.next.as_deref().unwrap_or(""),
            worst.context,
        ));
    }
    out
}

fn buckets(name: &'static str, buckets: &[Bucket]) -> String {
    let mut table = Table::new(&[(name, false), ("positions", true), ("mean KL", true), ("share", true)]);
    for bucket in buckets.iter().filter(|bucket| bucket.tokens > 0) {
        table.row([
            format!("{} to {}", bucket.from, bucket.to),
            bucket.tokens.to_string(),
            nats(bucket.mean_kl),
            format!("{:.0} %", 100.0 * bucket.share),
        ]);
    }
    format!("\n{}", table.render())
}
