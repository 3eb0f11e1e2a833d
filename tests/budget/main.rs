//! Budgets, through the program: sizes to the byte, ties, limits, controls, rebuilds and refusals.

#[path = "../common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use tqc::plan::{Limits, SourceFolder, plan};
use tqc::recipe::Recipe;

use crate::common::*;

/// Groups of 32 divide every width of every fixture.
const DEFAULT: &str = "[default]\ncodec = { affine = { bits = 4, group = 32 } }\n";
const CANDIDATES: [u32; 6] = [2, 3, 4, 5, 6, 8];

/// A fixture, and a file of costs for it in OptiQ's form: cost(b) = w(module) · 4^-b.
struct Case {
    dir: TempDir,
    source: PathBuf,
    /// Modules that take the default, in the plan's order.
    open: Vec<String>,
}

impl Case {
    fn new(name: &str) -> Self {
        let (dir, source) = (temp(), fixture(name));
        let recipe = recipe(dir.path(), DEFAULT);
        let plan = tqc!("plan", recipe, "--source", source, "--json").expect(0).json();
        let modules = plan["modules"].as_array().unwrap().iter();
        let open = modules.filter(|m| m["reason"] == "default").map(|m| text(m, "module")).collect();
        let case = Self { dir, source, open };
        case.write_costs(|index| ((index * 7919) % 13 + 1) as f64 / 1024.0);
        case
    }

    fn costs(&self) -> PathBuf {
        self.dir.path().join("costs.json")
    }

    fn write_costs(&self, scale: impl Fn(usize) -> f64) {
        let layers = self.open.iter().enumerate().map(|(index, name)| {
            let costs = CANDIDATES.map(|bits| (bits.to_string(), json!(scale(index) * 0.25f64.powi(bits as i32))));
            json!({ "layer_name": name, "sensitivities": costs.into_iter().collect::<serde_json::Map<_, _>>() })
        });
        write_json(&self.costs(), &json!({ "group_size": 32, "layers": layers.collect::<Vec<_>>() }));
    }

    fn recipe(&self, budget: &str, rest: &str) -> PathBuf {
        let budget = format!("[budget]\nsensitivity = \"costs.json\"\n{budget}\n");
        recipe(self.dir.path(), &format!("{DEFAULT}{budget}{rest}"))
    }

    fn plan(&self, budget: &str, rest: &str) -> Value {
        let recipe = self.recipe(budget, rest);
        tqc!("plan", recipe, "--source", self.source, "--json").expect(0).json()
    }

    #[track_caller]
    fn refused(&self, code: i32, budget: &str, rest: &str) -> String {
        let recipe = self.recipe(budget, rest);
        tqc!("plan", recipe, "--source", self.source).expect(code).stderr
    }
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap().to_owned()
}

fn codecs(plan: &Value) -> BTreeMap<String, String> {
    plan["modules"].as_array().unwrap().iter().map(|m| (text(m, "module"), text(m, "codec"))).collect()
}

fn bytes(plan: &Value) -> u64 {
    plan["sizes"]["weight_file_bytes"].as_u64().unwrap()
}

#[test]
fn the_files_of_every_family_hold_to_the_byte_and_waste_less_than_a_tie() {
    for name in fixtures() {
        let case = Case::new(&name);
        let narrow = bytes(&case.plan("bits-per-weight = 64", "[[rule]]\nmatch = \"*\"\nmost-bits = 2\n"));
        let wide = bytes(&case.plan("bits-per-weight = 64", ""));
        assert!(narrow < wide, "{name}");
        for part in 0..6 {
            let budget = narrow + (wide - narrow) * part / 6 + part;
            let plan = case.plan(&format!("bytes = \"{budget}\""), "");
            let found = bytes(&plan);
            assert!(found <= budget, "{name}: {found} of {budget}");
            assert_eq!(plan["allocation"]["weight_file_bytes"], found, "{name}");
            assert!(plan["allocation"]["control"]["weight_file_bytes"].as_u64().unwrap() <= budget, "{name}");
            let cost = |of: &Value| of["predicted_kl"].as_f64().unwrap();
            assert!(cost(&plan["allocation"]) <= cost(&plan["allocation"]["control"]), "{name}");
            // With costs that always fall, nothing that fits is left undone.
            let largest =
                plan["modules"].as_array().unwrap().iter().map(|m| m["weights"].as_u64().unwrap()).max();
            assert!(budget - found < 3 * largest.unwrap(), "{name}: {found} of {budget}");
        }
        // One byte below the least is refused, with the least.
        let message = case.refused(2, &format!("bytes = \"{}\"", narrow - 1), "");
        assert!(message.contains(&format!("would take at least {narrow} bytes")), "{message}");
        assert_eq!(bytes(&case.plan(&format!("bytes = \"{narrow}\""), "")), narrow, "{name}");
    }
}

#[test]
fn code_bits_are_the_average_width_of_what_the_budget_decides() {
    for name in ["qwen3_5", "llama-tied", "qwen3_5_moe"] {
        let case = Case::new(name);
        // The MLPs are left to the budget, and all else is wide.
        let wide = case.open.iter().filter(|name| !name.contains(".mlp.")).map(|name| {
            format!("[[rule]]\nmatch = \"{name}\"\ncodec = {{ affine = {{ bits = 8, group = 32 }} }}\n")
        });
        let rest = &wide.collect::<String>();
        for bits in [2.0, 2.75, 3.0, 3.25, 4.5, 8.0] {
            let plan = case.plan(&format!("code-bits = {bits}"), rest);
            let decided = plan["modules"].as_array().unwrap().iter().filter(|m| m["reason"] == "budget");
            let (mut weights, mut codes, mut largest) = (0, 0, 0);
            for module in decided {
                let of = module["weights"].as_u64().unwrap();
                let codec = module["codec"].as_str().unwrap();
                let wide: u64 = codec.strip_prefix("affine-").unwrap()[..1].parse().unwrap();
                (weights, codes, largest) = (weights + of, codes + of * wide, largest.max(of));
            }
            let found = codes as f64 / weights as f64;
            assert!(weights > 0 && found <= bits, "{name}: {found} of {bits}");
            // Two matrices are tied, and a step is two bits at most.
            let step = 4.0 * largest as f64 / weights as f64;
            assert!(found > bits - step, "{name}: {found} of {bits}");
        }
        let message = case.refused(2, "code-bits = 1.9", rest);
        assert!(message.contains("would take at least"), "{message}");
        let (recipe, out) =
            (case.recipe("code-bits = 3.5\ncontrol = \"off\"", rest), case.dir.path().join("out"));
        tqc!("build", recipe, "--source", case.source, "-o", out).expect(0);
        tqc!("verify", out, "--source", case.source, "--rebuild", "all").expect(0);
    }
}

#[test]
fn tied_modules_share_a_codec_and_what_is_not_open_is_left_alone() {
    for name in ["qwen3_5", "qwen3_5_moe", "llama-untied"] {
        let case = Case::new(name);
        let plan = case.plan("bits-per-weight = 9.0", "");
        let codecs = codecs(&plan);
        let mut differing = 0;
        for (module, codec) in &codecs {
            for (one, others) in [
                ("q_proj", &["k_proj", "v_proj"][..]),
                ("gate_proj", &["up_proj"][..]),
                ("in_proj_qkv", &["in_proj_z"][..]),
            ] {
                if let Some(parent) = module.strip_suffix(one).filter(|_| case.open.contains(module)) {
                    for other in others {
                        assert_eq!(codecs[&format!("{parent}{other}")], *codec, "{name} {module}");
                    }
                    differing += usize::from(codec != "affine-4g32");
                }
            }
        }
        assert!(differing > 0, "{name}: the budget decided nothing");
        for module in plan["modules"].as_array().unwrap() {
            let open = case.open.contains(&text(module, "module"));
            assert_eq!(module["reason"] == "budget", open, "{name} {module}");
        }
        let given: u64 =
            plan["allocation"]["histogram"].as_array().unwrap().iter().map(|h| h[1].as_u64().unwrap()).sum();
        assert_eq!(given, case.open.len() as u64, "{name}");
    }
}

#[test]
fn a_module_that_costs_more_gets_more_bits() {
    let case = Case::new("llama-tied");
    let dear = case.open.iter().position(|name| name.ends_with("layers.1.mlp.down_proj")).unwrap();
    case.write_costs(|index| if index == dear { 1000.0 } else { 0.001 });
    let narrow = bytes(&case.plan("bits-per-weight = 64", "[[rule]]\nmatch = \"*\"\nmost-bits = 2\n"));
    let plan = case.plan(&format!("bytes = \"{}\"", narrow + narrow / 2), "");
    let codecs = codecs(&plan);
    assert_eq!(codecs[&case.open[dear]], "affine-8g32");
    let others = case.open.iter().filter(|name| codecs[*name] == "affine-8g32").count();
    assert!(others < case.open.len() / 2, "{codecs:?}");
}

#[test]
fn rules_with_a_codec_are_obeyed_and_limits_are_kept() {
    let case = Case::new("llama-untied");
    let rules = "[[rule]]\nmatch = \"*.layers.0.mlp.down_proj\"\ncodec = \"mxfp4\"\n\
                 [[rule]]\nmatch = \"*.{q,k,v,o}_proj\"\nleast-bits = 5\nmost-bits = 6\n\
                 [[rule]]\nmatch = \"*.{gate,up}_proj\"\nmost-bits = 3\n";
    let plan = case.plan("bits-per-weight = 7.0", rules);
    let mut seen = 0;
    for (module, codec) in codecs(&plan) {
        let allowed: &[&str] = match module.rsplit('.').next().unwrap() {
            "q_proj" | "k_proj" | "v_proj" | "o_proj" => &["affine-5g32", "affine-6g32"],
            "gate_proj" | "up_proj" => &["affine-2g32", "affine-3g32"],
            "down_proj" if module.contains("layers.0.") => &["mxfp4"],
            _ => continue,
        };
        seen += 1;
        assert!(allowed.contains(&codec.as_str()), "{module} {codec}");
    }
    assert!(seen > 6);
    let message = case.refused(2, "bits-per-weight = 7.0", "[[rule]]\nmatch = \"*.norm\"\nleast-bits = 5\n");
    assert!(message.contains("`*.norm` limits no module that the budget gives bits to"), "{message}");
    let message =
        case.refused(2, "bits-per-weight = 7.0", "[[rule]]\nmatch = \"*.o_proj\"\nleast-bits = 9\n");
    assert!(message.contains("o_proj` can have none of affine-2g32, affine-3g32"), "{message}");
}

#[test]
fn an_artifact_is_rebuilt_and_verified_without_its_file_of_costs() {
    let case = Case::new("qwen3_5-tied");
    let recipe = case.recipe("bits-per-weight = 9.6", "");
    let (one, two) = (case.dir.path().join("one"), case.dir.path().join("two"));
    let first =
        tqc!("build", recipe, "--source", case.source, "-o", one, "--threads", "1", "--json").expect(0);
    let second =
        tqc!("build", recipe, "--source", case.source, "-o", two, "--threads", "3", "--json").expect(0);
    assert_eq!(first.digest(), second.digest());
    let record = read_json(&one.join("provenance.json"));
    assert_eq!(record["allocator"], "budget");
    assert_eq!(record["allocation"]["weight_file_bytes"], record["sizes"]["weight_file_bytes"]);
    let digest = tqc::digest::Digest::of(&fs::read(case.costs()).unwrap());
    assert_eq!(record["allocation"]["sensitivity_sha256"], digest.to_string());

    fs::remove_file(case.costs()).unwrap();
    tqc!("verify", one, "--source", case.source, "--rebuild", "all").expect(0);
    for (pointer, value) in [
        ("/allocation/budget_bytes", json!(1)),
        ("/allocation/method", json!("greedy")),
        ("/allocation/modules", json!(1)),
        ("/allocation", json!(null)),
    ] {
        let mut edited = record.clone();
        *edited.pointer_mut(pointer).expect(pointer) = value;
        fs::write(one.join("provenance.json"), format!("{edited}\n")).unwrap();
        tqc!("verify", one, "--source", case.source, "--rebuild", "all").expect(1);
    }
}

#[test]
fn another_file_of_costs_is_another_plan() {
    let case = Case::new("llama-tied");
    let before = case.plan("bits-per-weight = 7.0", "");
    let again = case.plan("bits-per-weight = 7.0", "");
    assert_eq!(before["plan_sha256"], again["plan_sha256"]);
    let text = fs::read_to_string(case.costs()).unwrap();
    fs::write(case.costs(), format!("{text} ")).unwrap();
    let after = case.plan("bits-per-weight = 7.0", "");
    assert_eq!(codecs(&before), codecs(&after));
    assert_ne!(before["plan_sha256"], after["plan_sha256"]);
}

#[test]
fn the_control_is_planned_in_the_same_bytes_without_looking_at_costs() {
    let case = Case::new("llama-untied");
    let path = case.recipe("bits-per-weight = 7.0", "");
    let made = |path: &Path| {
        let recipe = Recipe::load(path, &["rtn"]).unwrap();
        let source = SourceFolder { dir: case.source.clone(), hub: None };
        let limits = Limits { memory: None, threads: 1, isa: tqc::isa::Isa::Scalar };
        plan(recipe, source, limits).unwrap_or_else(|error| panic!("{error}"))
    };
    let chosen = made(&path);
    let control = chosen.control().unwrap_or_else(|error| panic!("{error}")).expect("there is a budget");
    let record = chosen.allocation.as_ref().unwrap();
    assert_eq!(control.allocator, "budget-control");
    assert_eq!(control.sizes.weight_file_bytes, record.control.weight_file_bytes);
    assert!(control.sizes.weight_file_bytes <= record.budget_bytes);
    assert_ne!(control.digest, chosen.digest);
    let of = |plan: &tqc::plan::Plan| -> Vec<String> {
        plan.modules.iter().map(|module| module.assignment.codec.to_string()).collect()
    };
    case.write_costs(|index| index as f64);
    assert_eq!(of(&made(&path).control().ok().flatten().unwrap()), of(&control));
    // Unrounded, nothing is given out, and no file is needed.
    fs::remove_file(case.costs()).unwrap();
    assert!(chosen.unrounded().is_ok());
}

#[test]
fn greed_is_never_better_than_exactness() {
    let case = Case::new("qwen3_5");
    for bits in ["8.0", "8.7", "9.4"] {
        let cost = |method: &str| {
            let plan = case.plan(&format!("bits-per-weight = {bits}\nmethod = \"{method}\""), "");
            plan["allocation"]["predicted_kl"].as_f64().unwrap()
        };
        assert!(cost("exact") <= cost("greedy"), "{bits}");
    }
}

#[test]
fn files_of_costs_that_do_not_fit_are_refused_by_name() {
    let case = Case::new("llama-tied");
    let budget = "bits-per-weight = 7.0";
    let whole = fs::read_to_string(case.costs()).unwrap();
    let mut file: Value = serde_json::from_str(&whole).unwrap();
    let last = file["layers"].as_array_mut().unwrap().pop().unwrap();
    write_json(&case.costs(), &file);
    let message = case.refused(3, budget, "");
    assert!(
        message.contains("costs.json`, lacks 1 of the modules")
            && message.contains(&text(&last, "layer_name"))
    );
    assert!(message.contains("help: "), "{message}");

    fs::write(case.costs(), whole.replace("down_proj", "down")).unwrap();
    let message = case.refused(3, budget, "");
    assert!(message.contains("names of no module of this model"), "{message}");

    fs::write(case.costs(), "nothing").unwrap();
    assert!(case.refused(3, budget, "").contains("is of no known format"));

    fs::write(case.costs(), &whole).unwrap();
    let message = case.refused(2, &format!("{budget}\ncandidates = [\"affine-4g32\", \"mxfp4\"]"), "");
    assert!(message.contains("the table of costs lacks mxfp4 for"), "{message}");
    let message = case.refused(2, budget, "[[rule]]\nmatch = \"*\"\ncodec = \"mxfp8\"\n");
    assert!(message.contains("no module is left to give bits to"), "{message}");

    fs::remove_file(case.costs()).unwrap();
    let message = case.refused(2, budget, "");
    assert!(message.contains("cannot be read"), "{message}");
}

/// Codes that errors are weighed for, on a text of a few documents.
fn weighed(case: &Case) -> &'static str {
    let lines: Vec<String> = (0..6)
        .map(|i| {
            json!({ "text": format!("the river ran {i} times to the mill and back; ").repeat(6) }).to_string()
        })
        .collect();
    fs::write(case.dir.path().join("text.jsonl"), lines.join("\n")).unwrap();
    "[default]\ncodec = { affine = { bits = 4, group = 32 } }\nencoder = \"gptq\"\n\
     [calibration]\ntext = \"text.jsonl\"\nrows = 4\ncontext = 24\n"
}

impl Case {
    /// A recipe with a calibration and a budget.
    fn calibrated(&self, budget: &str, rest: &str) -> PathBuf {
        let weighed = weighed(self);
        let budget = format!("[budget]\nsensitivity = \"costs.json\"\nbits-per-weight = 9.0\n{budget}\n");
        recipe(self.dir.path(), &format!("{weighed}{budget}{rest}"))
    }

    fn planned(&self, recipe: &Path) -> tqc::plan::Plan {
        let recipe = Recipe::load(recipe, &["rtn"]).unwrap();
        let source = SourceFolder { dir: self.source.clone(), hub: None };
        let limits = Limits { memory: None, threads: 2, isa: tqc::isa::Isa::best() };
        plan(recipe, source, limits).unwrap_or_else(|error| panic!("{error}"))
    }
}

#[test]
fn time_and_memory_of_a_build_are_those_of_the_whole_command() {
    let case = Case::new("qwen3_5");
    let built = |name: &str, budget: &str| {
        let (recipe, out) = (case.calibrated(budget, ""), case.dir.path().join(name));
        let planned = tqc!("plan", recipe, "--source", case.source, "--json").expect(0).json();
        let start = std::time::Instant::now();
        let said = tqc!("build", recipe, "--source", case.source, "-o", out, "--json").expect(0).json();
        let wall = start.elapsed().as_secs_f64();
        let machine = read_json(&out.join("machine.json"));
        for key in ["elapsed_s", "measure_s", "compare_s", "peak_resident_bytes", "peak_anonymous_bytes"] {
            assert_eq!(machine[key], said[key], "{name}: {key}");
        }
        let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
        assert!(number(&said, "elapsed_s") <= wall, "{said}");
        assert!(number(&said, "peak_anonymous_bytes") <= number(&planned, "peak_memory_bytes"), "{name}");
        assert!(said["measure_s"].is_null(), "no basis was measured");
        (said, wall, planned)
    };
    let (compared, wall, planned) = built("compared", "");
    let (elapsed, comparing) =
        (compared["elapsed_s"].as_f64().unwrap(), compared["compare_s"].as_f64().unwrap());
    assert!(0.0 < comparing && comparing < elapsed, "{comparing} of {elapsed}");
    // Both arms go through 4096 tokens and the prompts; writing some hundred KiB takes less.
    assert!(comparing > 0.5 * wall, "{comparing} of {wall}");
    assert!(planned["estimate"]["compare_s"].as_f64().unwrap() > 0.0);
    let (plain, _, planned) = built("plain", "control = \"off\"");
    assert!(plain["compare_s"].is_null() && plain["compared"].is_null(), "{plain}");
    assert_eq!(planned["estimate"]["compare_s"], 0.0);
    let peak = |said: &Value| said["peak_anonymous_bytes"].as_u64().unwrap();
    // What the source computed for each position is held while an arm is under way.
    let held = 4 * compared["compared"]["positions"].as_u64().unwrap() * 64;
    assert!(peak(&plain) == 0 || peak(&compared) > peak(&plain) + held, "{compared} {plain}");
}

#[test]
fn a_comparison_needs_the_disk_of_both_choices() {
    let case = Case::new("llama-untied");
    let mut plan = case.planned(&case.calibrated("", ""));
    let codes: u64 = plan.modules.iter().filter(|m| m.assignment.encoder == "gptq").map(|m| m.bytes()).sum();
    let both = plan.disk().0;
    plan.recipe.budget.as_mut().unwrap().control = tqc::recipe::Control::Off;
    assert_eq!(both - plan.disk().0, codes);
}

#[test]
fn a_build_takes_over_what_a_killed_comparison_found() {
    let case = Case::new("qwen3_5");
    let (recipe, out) = (case.calibrated("text = \"text.jsonl\"", ""), case.dir.path().join("out"));
    let whole = tqc!("build", recipe, "--source", case.source, "-o", case.dir.path().join("whole"), "--json")
        .expect(0);
    let slow =
        args!["build", recipe, "--source", case.source, "-o", out, "--isa", "scalar", "--threads", "1"];
    let mut child = command(slow).stderr(std::process::Stdio::null()).spawn().unwrap();
    let measuring = case.dir.path().join(".out.measuring");
    let found = || {
        let names = fs::read_dir(&measuring).into_iter().flatten();
        names.filter(|name| name.as_ref().unwrap().file_name().to_string_lossy().contains("-codes-")).count()
    };
    while child.try_wait().unwrap().is_none() && found() < 3 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(child.try_wait().unwrap().is_none(), "the build ended before it could be killed");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!case.dir.path().join(".out.building").exists() && found() >= 3);
    let run = tqc!("build", recipe, "--source", case.source, "-o", out, "--resume", "--json").expect(0);
    let said = "had not begun; what was measured for it was used again";
    assert!(run.stderr.contains(said) && !run.stderr.contains("no unfinished build"), "{}", run.stderr);
    assert_eq!(run.digest(), whole.digest());
    assert!(!measuring.exists());
    // Now nothing is left of it.
    let run = tqc!("build", recipe, "--source", case.source, "-o", out, "--resume").expect(0);
    assert!(
        run.stderr.contains("there is no unfinished build of") && !run.stderr.contains(said),
        "{}",
        run.stderr
    );
}

/// Remembers what was done.
#[derive(Default)]
struct Told(std::sync::Mutex<Vec<String>>);

impl tqc::build::Progress for Told {
    fn begin(&self, _: u64, _: u64, _: u64, _: u64) {}
    fn panel(&self, _: u64) {}
    fn module(&self, _: &str) {}
    fn phase(&self, what: &str) {
        self.0.lock().unwrap().push(what.to_owned());
    }
    fn end(&self) {}
}

#[test]
fn a_fold_that_a_comparison_found_exact_is_not_held_against_the_source_again() {
    use tqc::build::{Before, Options, Unfinished, build};
    use tqc::fold::{KeepFolder, Watch};
    let case = Case::new("llama-untied");
    let recipe = case.calibrated("text = \"text.jsonl\"", "[transform]\nrotation = \"hadamard\"\n");
    let plan = std::sync::Arc::new(case.planned(&recipe));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let folder = KeepFolder(case.dir.path().join("kept"));
    let told = Told::default();
    let tell = |what: &str| tqc::build::Progress::phase(&told, what);
    let compared = tqc::control::compare(&plan, Watch { stop: &stop, tell: &tell, keep: &folder });
    assert!(compared.unwrap_or_else(|error| panic!("{error}")).is_some());
    let times = |told: &Told| {
        let told = told.0.lock().unwrap();
        told.iter().filter(|what| *what == "comparing with the source").count()
    };
    assert_eq!(times(&told), 2, "once for each choice");
    let build = |name: &str, keep: &dyn tqc::fold::Keep| {
        let told = Told::default();
        let options = Options {
            target: &case.dir.path().join(name),
            unfinished: Unfinished::Refuse,
            strict: false,
            stop: &stop,
            progress: &told,
            found: keep,
            before: Before::nothing(),
            slice: None,
        };
        let finished = build(&plan, &options).unwrap_or_else(|error| panic!("{error}"));
        (finished.publish().unwrap().digest, times(&told))
    };
    let (alone, once) = build("alone", &());
    assert_eq!(once, 1);
    assert_eq!(build("after", &folder), (alone, 0), "the same record, from what was found");
    // What is not whole says nothing.
    let kept = fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().path());
    let kept: Vec<PathBuf> = kept.filter(|path| path.to_string_lossy().ends_with("-parity")).collect();
    assert_eq!(kept.len(), 2);
    for path in kept {
        let text = fs::read_to_string(&path).unwrap();
        let edited = text.replace("\"flips\":0", "\"flips\":1");
        assert_ne!(edited, text);
        fs::write(&path, edited).unwrap();
    }
    assert_eq!(build("damaged", &folder), (alone, 1));
}
