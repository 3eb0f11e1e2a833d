//! How long a build takes on this machine, from a few milliseconds of each encoder.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::calibration::input_sums;
use super::{CalibratedFrom, Module, Plan, STRIP_ELEMENTS, compares, layer_of};
use crate::arch::Role;
use crate::arch::decoder::{MixerKind, MlpConfig};
use crate::codec::{self, CodecSpec, Matrix};
use crate::digest::Hasher;
use crate::isa::Isa;
use crate::linalg::Symmetric;
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::serial;
use crate::quant::gptq::{GptqOptions, Weighted, solve};
use crate::quant::{GPTQ_REFIT, LDLQ, RowLoss, Rows, base, ldlq, quantizer, weighs};
use crate::recipe::Activations;
use crate::tensor::Float;

/// Tokens of a text that what a budget chose is compared on, at most.
pub const COMPARED_TOKENS: usize = 4096;

/// Prompts that it is compared on: the stop probe's forty, raw and as chat; and tokens that each has at most, more or less.
pub const COMPARED_PROMPTS: usize = 80;
pub(super) const PROMPT_TOKENS: usize = 48;

/// Time that a build should take, if storage keeps up and nothing else runs.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Estimate {
    /// Encoding, over all threads.
    pub encode_s: f64,
    /// Digests of files, tensors and planes, over all threads.
    pub digest_s: f64,
    /// Calibration, over all threads: operations counted at the rate of products here, and searches in proportion to a
    /// small one; 0 without one.
    pub calibrate_s: f64,
    /// Comparison of a budget's choice with an even one, over all threads, with the calibration that it takes; 0 without
    /// one.
    pub compare_s: f64,
    /// All of it, divided by the threads.
    pub total_s: f64,
}

/// Measures and adds up.
pub fn estimate(plan: &Plan) -> Estimate {
    let mut work: BTreeMap<(CodecSpec, &'static str), u64> = BTreeMap::new();
    for module in &plan.modules {
        *work.entry((module.assignment.codec, module.assignment.encoder)).or_default() += module.weights();
    }
    let encode_s: f64 = work
        .iter()
        .map(|((codec, encoder), weights)| *weights as f64 / weights_per_second(*codec, base(encoder), plan))
        .sum();
    // Every source byte goes into a file's digest and a tensor's at once; every stored one into a plane's and
    // later into its file's.
    let (source, stored) = (plan.sizes.source_bytes as f64, plan.sizes.weight_file_bytes as f64);
    let (one, both) = bytes_digested_per_second();
    let digest_s = source / both + 2.0 * stored / one;
    let counts = plan.calibration.is_some() || compares(&plan.recipe);
    let products = if counts { operations_per_second(plan.isa) } else { f64::INFINITY };
    let layers = times_by_layer(plan, products);
    // From zero: the sum of nothing is −0.
    let calibrate_s = layers.iter().fold(0.0, |sum, time| sum + time.pass_s + time.search_s);
    let compare_s = compare_seconds(plan, encode_s, calibrate_s, products);
    let total_s = (encode_s + digest_s + calibrate_s + compare_s) / plan.threads as f64;
    Estimate { encode_s, digest_s, calibrate_s, compare_s, total_s }
}

/// Multiplications and additions of a calibration's products; 0 without one.
///
/// With T tokens, W weights that a token goes through, attention of width A, and for each matrix [N, K] of the search
/// S sweeps (0 for `gptq`)
///
/// ```text
/// pass      2 T W · passes           layers; `sequential` activations take two passes
///         + 2 T context A            scores and values of attention, half of them masked, in each pass
///         + 8 T Nv dk dv             reading and writing the states of a DeltaNet, in each pass
/// sums      T K²                     half of each input's second moments; an expert sees its share of T
/// factor    K³ / 3                   of each matrix; in `ldlq`, of each refit's system too
/// search    N K² (4 + 2 S)           losses of both codes and of the weight, feedback; a gradient each sweep
///         + N K² 5 (S + 1)           of `ldlq`: gradients and squares of refits, if S is not 0
/// ```
///
/// It is taken that rows are as long as they may be, and that the first damping holds. Changes of basis, which are made
/// again for each layer, are not counted, nor is what a search does inside panels of columns: that is measured.
pub fn calibration_operations(plan: &Plan) -> f64 {
    operations_by_layer(plan).values().fold(0.0, |sum, [pass, search]| sum + pass + search)
}

/// Number of a decoder layer; none after the last.
type Layer = Option<usize>;

/// [`calibration_operations`] by layer: of the pass with the sums, and of the searches with their factors.
fn operations_by_layer(plan: &Plan) -> BTreeMap<Layer, [f64; 2]> {
    let mut layers: BTreeMap<Layer, [f64; 2]> = BTreeMap::new();
    let Some(from) = &plan.calibration else { return layers };
    let wanted = &plan.recipe.calibration;
    let context = f64::from(wanted.context);
    let tokens = match from.from {
        CalibratedFrom::Text => f64::from(wanted.rows) * context,
        CalibratedFrom::Hessians => 0.0,
    };
    let passes = if wanted.activations == Activations::Sequential { 2.0 } else { 1.0 };
    let chosen = chosen_experts(plan);
    for (layer, each) in operations_per_token(plan, context) {
        layers.entry(layer).or_default()[0] += passes * tokens * each;
    }
    for sum in input_sums(&plan.modules) {
        let seen = if sum.experts { tokens * chosen } else { tokens };
        layers.entry(number(sum.layer)).or_default()[0] += seen * (sum.channels as f64).powi(2);
    }
    for module in plan.modules.iter().filter(|module| weighs(module.assignment.encoder)) {
        let columns = module.work.row_elements as f64;
        let matrices = if module.output.role == Role::Experts { module.output.shape.0[0] } else { 1 };
        let each = search_operations(plan, module.assignment.encoder);
        let factors = 1.0 + refits(plan, module.assignment.encoder);
        let factors = factors * matrices as f64 * columns.powi(3) / 3.0;
        let search = factors + each * module.weights() as f64 * columns;
        layers.entry(of_module(module)).or_default()[1] += search;
    }
    layers
}

/// The number at the end of a layer's path.
fn number(layer: &str) -> Layer {
    layer.rsplit_once('.')?.1.parse().ok()
}

fn of_module(module: &Module) -> Layer {
    layer_of(&module.output.module).and_then(number)
}

/// What one layer of a calibration took, or should take: wall time, seconds.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct LayerTime {
    /// Its number; none for what comes after the last layer.
    pub layer: Option<usize>,
    /// The rows' way through it, with second moments.
    pub pass_s: f64,
    /// The search for its codes.
    pub search_s: f64,
}

/// Every layer of a calibration on one thread: its operations at the rate of `products`, and what searches spend inside
/// panels of columns.
fn times_by_layer(plan: &Plan, products: f64) -> Vec<LayerTime> {
    let time = |(layer, [pass, search]): (Layer, [f64; 2])| LayerTime {
        layer,
        pass_s: pass / products,
        search_s: search / products,
    };
    let mut layers: Vec<LayerTime> = operations_by_layer(plan).into_iter().map(time).collect();
    let mut rates: BTreeMap<(CodecSpec, &'static str), f64> = BTreeMap::new();
    for module in plan.modules.iter().filter(|module| weighs(module.assignment.encoder)) {
        let (codec, encoder) = (module.assignment.codec, module.assignment.encoder);
        let each = rates
            .entry((codec, encoder))
            .or_insert_with(|| seconds_inside_panels(codec, encoder, plan, products));
        let layer = layers.iter_mut().find(|time| time.layer == of_module(module));
        layer.expect("its operations are counted").search_s += module.weights() as f64 * *each;
    }
    layers
}

/// How long a build takes whose first layers were measured.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Extrapolated {
    /// Ways through all layers: estimated, times what the measured ones took of their estimates.
    pub pass_s: f64,
    /// Searches in all layers and after them, in the same way.
    pub search_s: f64,
    /// Everything else, as estimated.
    pub rest_s: f64,
    /// The sum.
    pub total_s: f64,
    /// What the measured layers took of their estimates.
    pub of_estimate: f64,
}

/// What the whole build should take, since these layers of its calibration took so long; none if none did.
pub fn extrapolate(plan: &Plan, measured: &[LayerTime]) -> Option<Extrapolated> {
    let layers = times_by_layer(plan, operations_per_second(plan.isa));
    let scaled = |part: fn(&LayerTime) -> f64| {
        let these = layers.iter().filter(|time| measured.iter().any(|found| found.layer == time.layer));
        let shared = |seconds: f64| seconds / plan.threads as f64;
        let (estimated, found) = (shared(these.map(part).sum()), measured.iter().map(part).sum::<f64>());
        let all = shared(layers.iter().map(part).sum());
        (estimated > 0.0).then(|| (all * found / estimated, estimated, found))
    };
    let (pass_s, pass_estimated, pass_found) = scaled(|time| time.pass_s)?;
    let (search_s, search_estimated, search_found) = scaled(|time| time.search_s)?;
    let Estimate { encode_s, digest_s, compare_s, .. } = estimate(plan);
    let rest_s = (encode_s + digest_s + compare_s) / plan.threads as f64;
    let of_estimate = (pass_found + search_found) / (pass_estimated + search_estimated);
    Some(Extrapolated { pass_s, search_s, rest_s, total_s: pass_s + search_s + rest_s, of_estimate })
}

/// Of a search, for each weight and column.
fn search_operations(plan: &Plan, encoder: &str) -> f64 {
    let sweeps = if matches!(encoder, GPTQ_REFIT | LDLQ) { plan.recipe.gptq.sweeps } else { 0 };
    4.0 + 2.0 * f64::from(sweeps) + 5.0 * refits(plan, encoder)
}

/// Times that a search solves for all scales of a matrix at once.
fn refits(plan: &Plan, encoder: &str) -> f64 {
    match plan.recipe.gptq.sweeps {
        sweeps @ 1.. if encoder == LDLQ => f64::from(sweeps) + 1.0,
        _ => 0.0,
    }
}

/// Of each layer, for a token of a row of `context`.
fn operations_per_token(plan: &Plan, context: f64) -> BTreeMap<Layer, f64> {
    let mut layers: BTreeMap<Layer, f64> = BTreeMap::new();
    let chosen = chosen_experts(plan);
    for module in plan.modules.iter().filter(|m| m.computes && layer_of(&m.output.module).is_some()) {
        let weights = match module.output.role {
            Role::Experts => module.weights() as f64 * chosen / module.output.shape.0[0] as f64,
            _ => module.weights() as f64,
        };
        *layers.entry(of_module(module)).or_default() += 2.0 * weights;
    }
    let Ok(decoder) = plan.arch.decoder(&plan.config, &plan.model) else { return layers };
    for (layer, kind) in decoder.layers.iter().enumerate() {
        *layers.entry(Some(layer)).or_default() += match (kind, &decoder.delta_net) {
            (MixerKind::Attention { window }, _) => {
                let seen = window.map_or(context, |window| context.min(2.0 * window as f64));
                2.0 * seen * (decoder.attention.q_heads * decoder.attention.head_dim) as f64
            }
            (MixerKind::DeltaNet, Some(net)) => 8.0 * (net.value_heads * net.key_dim * net.value_dim) as f64,
            (MixerKind::DeltaNet, None) => 0.0,
        };
    }
    layers
}

/// Experts that a token goes to.
fn chosen_experts(plan: &Plan) -> f64 {
    match plan.arch.decoder(&plan.config, &plan.model).map(|decoder| decoder.mlp) {
        Ok(MlpConfig::Experts { chosen, .. }) => chosen as f64,
        _ => 1.0,
    }
}

/// Of a comparison of the chosen codecs with an even choice, over all threads: a calibration more, since the build takes
/// over the codes of the chosen ones; all weights encoded twice; source and both arms on the text and the prompts.
fn compare_seconds(plan: &Plan, encode_s: f64, calibrate_s: f64, products: f64) -> f64 {
    if plan.allocation.is_none() || !compares(&plan.recipe) {
        return 0.0;
    }
    let tokens = COMPARED_TOKENS + COMPARED_PROMPTS * PROMPT_TOKENS;
    let positions = COMPARED_TOKENS + COMPARED_PROMPTS;
    let each: f64 = operations_per_token(plan, PROMPT_TOKENS as f64).values().sum();
    let layers = tokens as f64 * each;
    let vocab = plan.arch.decoder(&plan.config, &plan.model).map_or(0, |decoder| decoder.vocab);
    let head = 2.0 * positions as f64 * plan.model.hidden as f64 * vocab as f64;
    // The source's logits are made anew beside those of each arm.
    calibrate_s + 2.0 * encode_s + (3.0 * layers + 4.0 * head) / products
}

/// Seconds of one thread, for each weight, that a search spends beside products over all columns.
fn seconds_inside_panels(codec: CodecSpec, encoder: &'static str, plan: &Plan, products: f64) -> f64 {
    /// A strip of rows, and two panels of columns.
    const ROWS: usize = 128;
    const COLUMNS: usize = 256;
    let values = sawtooth(ROWS * COLUMNS);
    let matrix = Matrix { out_features: ROWS as u64, in_features: COLUMNS as u64 };
    let (Some(base), Ok(planes)) =
        (quantizer(base(encoder)), codec::codec(codec).planes(matrix, Float::Bf16))
    else {
        return 0.0;
    };
    // Neighbours go together, and the further apart the less.
    let full: Vec<f32> =
        (0..COLUMNS * COLUMNS).map(|i| 1.0 / (1 + (i / COLUMNS).abs_diff(i % COLUMNS)) as f32).collect();
    let hessian = Symmetric::from_full(&full, COLUMNS);
    let weighted = Weighted {
        values: &values,
        in_features: COLUMNS,
        float: Float::Bf16,
        hessian: &hessian,
        outputs: None,
    };
    let gptq = plan.recipe.gptq;
    let options = GptqOptions {
        refit: encoder == GPTQ_REFIT,
        sweeps: gptq.sweeps,
        act_order: gptq.act_order,
        damping: gptq.damping,
    };
    let mut buffers: Vec<Vec<u8>> =
        planes.iter().map(|plane| vec![0; plane.bytes_of(plane.begun(0..ROWS as u64))]).collect();
    let mut losses = vec![RowLoss::default(); ROWS];
    let rate = rate(|| {
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        // The values are finite and small, so no refusal is possible.
        if encoder == LDLQ {
            let _ = ldlq::solve(codec, weighted, &options, plan.isa, &serial, &mut slices, &mut losses);
        } else {
            let _ = solve(codec, weighted, base, &options, plan.isa, &serial, &mut slices, &mut losses);
        }
    });
    let weights = (ROWS * COLUMNS) as f64;
    let of_products = search_operations(plan, encoder) * weights * COLUMNS as f64
        + (1.0 + refits(plan, encoder)) * (COLUMNS as f64).powi(3) / 3.0;
    (1.0 / rate - of_products / products).max(0.0) / weights
}

/// Numbers of no pattern that a group could have: none is constant, and no two neighbours are equal.
fn sawtooth(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37) % 101) as f32 / 101.0 - 0.5).collect()
}

/// Of products of f32 on one thread, of matrices that the first caches do not hold.
fn operations_per_second(isa: Isa) -> f64 {
    const ROWS: usize = 128;
    const OUT: usize = 512;
    const COLUMNS: usize = 512;
    let (x, w) = (sawtooth(ROWS * COLUMNS), sawtooth(OUT * COLUMNS));
    let x = Strided { values: &x, stride: COLUMNS, rows: ROWS };
    let w = Strided { values: &w, stride: COLUMNS, rows: OUT };
    let mut out = vec![0.0; ROWS * OUT];
    rate(|| multiply(x, w, COLUMNS, &mut out, OUT, isa)) * (2 * ROWS * OUT * COLUMNS) as f64
}

fn weights_per_second(codec: CodecSpec, encoder: &'static str, plan: &Plan) -> f64 {
    const ROW: usize = 512;
    let rows = STRIP_ELEMENTS / ROW;
    let matrix = Matrix { out_features: rows as u64, in_features: ROW as u64 };
    let values = sawtooth(STRIP_ELEMENTS);
    let (Some(quantizer), Ok(planes)) = (quantizer(encoder), codec::codec(codec).planes(matrix, Float::Bf16))
    else {
        return f64::INFINITY;
    };
    let mut buffers: Vec<Vec<u8>> =
        planes.iter().map(|plane| vec![0; plane.bytes_of(plane.begun(0..rows as u64))]).collect();
    let mut losses = vec![RowLoss::default(); rows];
    let rate = rate(|| {
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let rows = Rows { values: &values, in_features: ROW, float: Float::Bf16, ahead: &[] };
        // The values are finite and small, so no refusal is possible.
        let _ = quantizer.fit(codec, rows, plan.isa, &mut slices, &mut losses);
    });
    rate * STRIP_ELEMENTS as f64
}

/// Of one digest, and of two over the same bytes.
fn bytes_digested_per_second() -> (f64, f64) {
    let block = vec![0x5a; 1 << 18];
    let (mut first, mut second) = (Hasher::default(), Hasher::default());
    let one = rate(|| first.update(&block));
    let both = rate(|| Hasher::update_both(&mut first, &mut second, &block));
    (one * block.len() as f64, both * block.len() as f64)
}

/// Calls per second, from the fastest of several calls within about five milliseconds.
fn rate(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut fastest = Duration::MAX;
    for round in 0.. {
        let before = Instant::now();
        call();
        fastest = fastest.min(before.elapsed());
        if round >= 2 && start.elapsed() > Duration::from_millis(5) {
            break;
        }
    }
    1.0 / fastest.as_secs_f64().max(1e-9)
}
