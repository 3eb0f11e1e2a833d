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
