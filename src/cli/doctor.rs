//! `tqc doctor`.

use clap::Args;
use serde_json::json;

use super::{Common, print};
use crate::failure::{Exit, Outcome};
use crate::isa::Isa;
use crate::process::{free_space, machine_memory};
use crate::tool::Tool;
use crate::units::Bytes;

/// Show what the program finds on this machine and which kernels it would use.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    common: Common,
}

impl DoctorArgs {
    pub fn run(self) -> Outcome<Exit> {
        let tool = Tool::this();
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let isas: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
        let memory = machine_memory();
        let disk = free_space(std::path::Path::new(".")).ok();
        let features = cpu_features();
        if self.common.json {
            print::json(&json!({
                "tool": tool, "operating_system": std::env::consts::OS, "architecture": std::env::consts::ARCH,
                "cpu_features": features, "kernels": isas, "chosen_kernels": Isa::best().to_string(),
                "threads": threads, "memory_bytes": memory.map(|(total, _)| total),
                "available_memory_bytes": memory.map(|(_, available)| available), "free_disk_bytes": disk,
            }))?;
            return Ok(Exit::Done);
        }
        let or_unknown = |bytes: Option<Bytes>| bytes.map_or("unknown".to_owned(), |b| b.to_string());
        print::text(&format!(
            "program    {} {} (source {})\nsystem     {} {}\ncpu        {}\nkernels    {} (chosen: {})\nthreads    {threads}\nmemory     {}, {} available\ndisk here  {} free\n",
            tool.name,
            tool.version,
            tool.source_sha256.short(),
            std::env::consts::OS,
            std::env::consts::ARCH,
            if features.is_empty() { "baseline".to_owned() } else { features.join(" ") },
            isas.join(" "),
            Isa::best(),
            or_unknown(memory.map(|(total, _)| total)),
            or_unknown(memory.map(|(_, available)| available)),
            or_unknown(disk),
        ))?;
        Ok(Exit::Done)
    }
}

/// Features that kernels ask for, as far as this processor has them.
fn cpu_features() -> Vec<&'static str> {
    #[allow(unused_mut)]
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! probe {
            ($($name:tt),*) => { $(if is_x86_feature_detected!($name) { found.push($name); })* };
        }
        probe!(
            "avx2",
            "fma",
            "f16c",
            "bmi1",
            "bmi2",
            "lzcnt",
            "popcnt",
            "avx512f",
            "avx512bw",
            "avx512dq",
            "avx512vl",
            "avx512vbmi",
            "avx512vnni"
        );
        probe!("sha", "sse4.1");
    }
    #[cfg(target_arch = "aarch64")]
    found.push("neon");
    found
}
