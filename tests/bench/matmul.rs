//! The exact matrix product beside that of the `gemm` crate: y = x · wᵀ, f32, x: [512, 5120], w: [5120, 5120].
//!
//! `cargo bench --bench matmul`. The two take turns, and each rate is that of the median turn, because other
//! processes may hold a core for a while. `gemm` may choose its own order of sums; ours is fixed, and computing it
//! by `Cpu::linear` includes copying x and w into tiles.

use std::sync::Arc;
use std::time::Instant;

use tqc::backend::cpu::{Cpu, Input};
use tqc::backend::{LinearOp, Packed, Precision, Stored};
use tqc::codec::CodecSpec;
use tqc::isa::Isa;
use tqc::tensor::Float;

const T: usize = 512;
const N: usize = 5120;
const K: usize = 5120;
const TURNS: usize = 9;

fn numbers(count: usize, prime: usize) -> Vec<f32> {
    (0..count).map(|i| (i * prime % 1000) as f32 * 1e-3 - 0.5).collect()
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn main() {
    let (x, w) = (numbers(T * K, 7919), numbers(N * K, 104_729));
    let bytes: Vec<u8> = w.iter().flat_map(|w| w.to_le_bytes()).collect();
    let len = bytes.len();
    let planes = vec![Stored::Owned(Arc::new(bytes), 0..len)];
    let weight = Packed::whole(CodecSpec::Keep, Float::F32, N, K, planes);
    let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    println!("x [{T}, {K}] by w [{N}, {K}], f32, GFLOP/s: median of {TURNS} alternating runs");
    for threads in if all == 1 { vec![1] } else { vec![1, all] } {
        let cpu = Cpu::new(Isa::best(), threads, Precision::Exact);
        let op = cpu.prepare(&weight, true);
        let (mut ours, mut theirs) = (vec![0f32; T * N], vec![0f32; T * N]);
        let (mut our_times, mut their_times) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            let start = Instant::now();
            let mut work: [(&dyn LinearOp, &mut [f32]); 1] = [(&*op, &mut ours)];
            cpu.linear(&Input::new(&x, K), &mut work);
            our_times.push(start.elapsed().as_secs_f64());

            let parallelism =
                if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
            let start = Instant::now();
            // SAFETY: column and row strides stay inside [T, N], [T, K] and [N, K].
            unsafe {
                gemm::gemm(
                    T,
                    N,
                    K,
                    theirs.as_mut_ptr(),
                    1,
                    N as isize,
                    false,
                    x.as_ptr(),
                    1,
                    K as isize,
                    w.as_ptr(),
                    K as isize,
                    1,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    parallelism,
                );
            }
            their_times.push(start.elapsed().as_secs_f64());
        }
        let apart = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let rate = |times: Vec<f64>| 2.0 * (T * N * K) as f64 / median(times) / 1e9;
        let (ours, theirs) = (rate(our_times), rate(their_times));
        println!(
            "{threads} threads: tqc {ours:.0}, gemm {theirs:.0}: {:.0} %; results at most {apart:.1e} apart",
            100.0 * ours / theirs
        );
    }
}
