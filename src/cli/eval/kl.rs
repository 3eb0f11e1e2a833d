//! `tqc eval kl`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::{BudgetArgs, DbArgs, MeasuredArgs, PathArgs, Steps, nats};
use crate::arch::Config;
use crate::backend::Precision;
use crate::cli::Common;
use crate::cli::generate::interrupt;
use crate::cli::print::{self, Table};
use crate::digest::{Digest, canonical_json};
use crate::eval::db::{Document, Key};
use crate::eval::dump::Dump;
use crate::eval::identity::Identity;
use crate::eval::kl::layers::{LayerKl, layers};
use crate::eval::kl::run::{Timings, check};
use crate::eval::kl::summary::Bucket;
use crate::eval::kl::{Candidate, Scoring, Summary, VERSION, score, summarize};
use crate::eval::work::Work;
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
    model: MeasuredArgs,
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
    /// End with 1 if a logit is NaN or infinite.
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
        dump.speaker(self.head.as_deref(), &cpu)?;
        let teacher_dir = self.layers.map(|_| dump.teacher_dir(self.head.as_deref())).transpose()?;

        let key = Key {
            instrument: "kl",
            version: VERSION,
            model: identity.digest,
            subject: json!({ "dump": dump.digest }),
            settings: json!({
                "path": if self.decode { "decode" } else { "streamed" },
                "precision": if self.path.fast { Precision::Fast } else { Precision::Exact },
            }),
        };
        let db = self.db.create()?;
        let open = db.begin(&key, &identity, self.db.fresh)?;
        let mut documents = db.documents(open.id)?;
        documents.truncate(documents.iter().enumerate().take_while(|(i, d)| *i == d.sequence).count());
        if open.resumed {
            print::say(&format!(
                "going on with run {}: {} of {} sequences are scored",
                open.id,
                documents.len(),
                dump.sequences.len()
            ));
        }
        let name = Digest::of(&canonical_json(&key)).short();
        let target = self.db.db.with_file_name(format!("eval-{name}"));
        let work = (!self.decode).then(|| Work::take(&target, &key, true)).transpose()?;
        if let Some(work) = work.as_ref().filter(|_| !open.resumed) {
            work.forget("residual.json");
        }
        let candidate = match self.decode {
            true => Candidate::Decoding(Box::new(Model::new(weights, cpu.clone())?)),
            false => Candidate::Streamed(Box::new(weights), cpu.clone()),
        };
        let steps = Steps::new("kl");
        let scoring = Scoring {
            dump: &dump,
            head: self.head.as_deref(),
            budget: self.budget.memory,
            work: work.as_ref(),
            done: documents.len(),
            stop: &stop,
            progress: &steps,
        };
        let scored = score(&candidate, &scoring, &mut |sequence, positions| {
            let document = dump.sequences[sequence].document;
            let document = Document { sequence, document, positions: positions.to_vec() };
            db.put_document(open.id, &document)?;
            documents.push(document);
            Ok(())
        });
        let timings = match scored {
            Ok(timings) => timings,
            Err(error) => {
                db.spend(open.id, steps.seconds())?;
                return Err(error);
            }
        };
        let layers = match (&teacher_dir, self.layers) {
            (Some(teacher), Some(count)) => {
                let teacher = Weights::open(teacher)?;
                let sequences: Vec<Vec<u32>> =
                    dump.sequences.iter().take(count as usize).map(|s| s.tokens.clone()).collect();
                let cpu: Arc<_> = self.model.cpu(Precision::Exact);
                Some(layers(&teacher, &Weights::open(&dir)?, &cpu, &sequences, &stop, &steps)?)
            }
            _ => None,
        };
        let sequences: Vec<_> = documents.into_iter().map(|document| document.positions).collect();
        let tokenizer = if self.worst > 0 { Tokenizer::open(&dir).ok() } else { None };
        let summary = summarize(&dump, &sequences, self.worst, tokenizer.as_ref())?;
        let mut memory = PeakMemory::default();
        memory.sample();
        let seconds = timings.layers_s + timings.heads_s + timings.divergence_s;
        let report = Report {
            tokens_per_s: if seconds > 0.0 { timings.positions as f64 / seconds } else { 0.0 },
            summary,
            layers,
            model: identity.digest,
            dump: dump.digest,
            bits_per_weight: identity.bits_per_weight,
            run: open.id,
            timings,
            memory,
        };
        let value = serde_json::to_value(&report).expect("a report is plain data");
        db.finish(open.id, &value, steps.seconds())?;
        steps.end();
        if let Some(work) = work {
            work.remove()?;
        }
        print::result(self.common.json, &report, |report| text(report, &identity))?;
        Ok(if self.strict && report.summary.non_finite > 0 { Exit::No } else { Exit::Done })
    }
}

fn text(report: &Report, identity: &Identity) -> String {
    let s = &report.summary;
    let interval = match s.ci95 {
        Some(ci) => format!("[{}, {}]", nats(ci.low), nats(ci.high)),
        None => "no interval: one document".to_owned(),
    };
    let ppl = |ppl: Option<f64>| ppl.map_or_else(|| "-".to_owned(), |ppl| format!("{ppl:.4}"));
    let mut out = format!(
        "model         {} ({}, {:.3} bits per weight)\nmean KL       {} nats per token, 95 % {interval}\n\
         noise floor   {}\nmedian        {}   p90 {}   p99 {}   p99.9 {}   max {}\n\
         top-1         {:.4} agree\nperplexity    {} (teacher {})\n\
         positions     {} in {} documents; {} not finite\n",
        identity.name,
        identity.digest.short(),
        identity.bits_per_weight,
        nats(s.mean_kl),
        nats(s.noise_floor),
        nats(s.median_kl),
        nats(s.p90_kl),
        nats(s.p99_kl),
        nats(s.p999_kl),
        nats(s.max_kl),
        s.top1_agreement,
        ppl(s.candidate_ppl),
        ppl(s.teacher_ppl),
        s.tokens,
        s.documents,
        s.non_finite,
    );
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
            table.row([layer.layer.to_string(), nats(layer.mean_kl), error]);
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
