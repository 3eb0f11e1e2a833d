//! llama.cpp's `_logits_` files: written here as its source says, from logits that the runtime gives.

use std::fs;
use std::path::Path;

use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::isa::Isa;
use tqc::runtime::{Model, Want, Weights};
use tqc::text::Tokenizer;

use crate::common::*;
use crate::{demo, golden, tqc};

const CONTEXT: usize = 32;

fn model(dir: &Path) -> Model {
    Model::new(Weights::open(dir).unwrap(), Cpu::new(Isa::best(), 1, Precision::Exact)).unwrap()
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = row.iter().map(|x| (f64::from(*x) - most).exp()).sum();
    row.iter().map(|x| f64::from(*x) - most - sum.ln()).collect()
}

/// `log_softmax` of perplexity.cpp: scale, least, codes.
fn encoded(row: &[f32]) -> Vec<u8> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let least = row.iter().copied().fold(f32::INFINITY, f32::min).max(most - 16.0);
    let sum: f64 = row.iter().map(|x| f64::from((x - most).exp())).sum();
    let scale = (most - least) / 65535.0;
    let mut bytes = [scale.to_le_bytes(), (least - most - sum.ln() as f32).to_le_bytes()].concat();
    for x in row {
        let code = if *x > least { ((x - least) / scale).round_ties_even() as u16 } else { 0 };
        bytes.extend(code.to_le_bytes());
    }
    if row.len() % 2 == 1 {
        bytes.extend([0, 0]);
    }
    bytes
}

/// The file, its chunks, and the logits [CONTEXT, V] of each.
fn written(path: &Path) -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
    let dir = demo();
    let text = fs::read_to_string(golden("eval/text.jsonl")).unwrap();
    let tokens = Tokenizer::open(&dir).unwrap().encode(&text, true).unwrap();
    let chunks: Vec<Vec<u32>> = tokens.chunks_exact(CONTEXT).take(3).map(<[u32]>::to_vec).collect();
    let model = model(&dir);
    let vocab = model.config().vocab;
    let logits: Vec<Vec<f32>> = chunks
        .iter()
        .map(|tokens| model.forward(&mut model.state(), tokens, Want::All).unwrap().logits)
        .collect();
    let mut bytes = b"_logits_".to_vec();
    for count in [CONTEXT, vocab, chunks.len()] {
        bytes.extend((count as i32).to_le_bytes());
    }
    bytes.extend(chunks.iter().flatten().flat_map(|id| (*id as i32).to_le_bytes()));
    for rows in &logits {
        for row in rows.chunks_exact(vocab).take(CONTEXT - 1).skip(CONTEXT / 2) {
            bytes.extend(encoded(row));
        }
    }
    fs::write(path, bytes).unwrap();
    (chunks, logits)
}

#[test]
fn a_file_of_llama_cpp_is_scored_at_its_own_positions_and_within_its_own_floor() {
    let dir = temp();
    let (file, db) = (dir.path().join("base.kld"), dir.path().join("eval.db"));
    let (chunks, logits) = written(&file);
    let demo = demo();
    let own = tqc!("eval", "kl", "--teacher", &file, &demo, "--db", &db, "--json").expect(0).json();
    assert_eq!((own["tokens"].as_u64(), own["documents"].as_u64()), (Some(3 * 15), Some(3)));
    let (kl, floor) = (own["mean_kl"].as_f64().unwrap(), own["noise_floor"].as_f64().unwrap());
    assert!(kl < 2.0 * floor && floor < 1e-8, "{kl} {floor}");
    assert_eq!(own["top1_agreement"], 1.0);

    let recipe = recipe(dir.path(), &default_codec("{ affine = { bits = 2, group = 64 } }"));
    let artifact = dir.path().join("artifact");
    tqc!("build", recipe, "--source", &demo, "-o", &artifact).expect(0);
    let found = tqc!("eval", "kl", "--teacher", &file, &artifact, "--db", &db, "--json").expect(0).json();
    let candidate = model(&artifact);
    let vocab = candidate.config().vocab;
    let (mut sum, mut count, mut teacher_nll) = (0.0, 0, 0.0);
    for (tokens, teacher) in chunks.iter().zip(&logits) {
        let own = candidate.forward(&mut candidate.state(), tokens, Want::All).unwrap().logits;
        for at in CONTEXT / 2..CONTEXT - 1 {
            let row = |logits: &[f32]| log_softmax(&logits[at * vocab..(at + 1) * vocab]);
            let (p, q) = (row(teacher), row(&own));
            sum += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            teacher_nll -= p[tokens[at + 1] as usize];
            count += 1;
        }
    }
    let mean = sum / f64::from(count);
    let kl = found["mean_kl"].as_f64().unwrap();
    // Below the whole by what the tokens beyond 16 nats add.
    assert!(kl <= mean + 1e-6 && kl > 0.98 * mean, "{kl} {mean}");
    let ppl = (teacher_nll / f64::from(count)).exp();
    // Null if a next token is among those that the file does not resolve.
    let known = found["teacher_ppl"].as_f64().unwrap_or(ppl);
    assert!((known / ppl - 1.0).abs() < 1e-2, "{found}");
}

#[test]
fn cut_and_impossible_files_are_refused() {
    let dir = temp();
    let file = dir.path().join("base.kld");
    written(&file);
    let whole = fs::read(&file).unwrap();
    let refused = |bytes: &[u8], words: &str| {
        fs::write(&file, bytes).unwrap();
        let demo = demo();
        let run = tqc!("eval", "kl", "--teacher", &file, demo, "--db", dir.path().join("eval.db")).expect(3);
        assert!(run.stderr.contains(words) && run.stderr.contains("help: "), "{words}: {}", run.stderr);
    };
    refused(&whole[..whole.len() - 2], "bytes, but the dump's record says");
    refused(&whole[..10], "does not begin with `_logits_`");
    let mut counts = whole.clone();
    counts[8..12].copy_from_slice(&(-1i32).to_le_bytes());
    refused(&counts, "it counts -1 tokens of context");
    let mut token = whole.clone();
    token[20..24].copy_from_slice(&1_000_000i32.to_le_bytes());
    refused(&token, "has token 1000000, beyond a vocabulary of 4096");
    let mut scale = whole;
    let at = scale.len() - 2 * (4096 + 4);
    scale[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&scale, "has a scale of NaN");
}
