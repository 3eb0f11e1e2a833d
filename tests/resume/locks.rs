//! A lock pins what went into an artifact and what came out.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::common::*;

struct Locked {
    dir: TempDir,
    model: Model,
}

impl Locked {
    fn new() -> Self {
        let dir = temp();
        let model = Model::fixture("llama-tied");
        model.write(&dir.path().join("source"));
        recipe(dir.path(), &default_codec(AFFINE_4_32));
        let locked = Self { dir, model };
        locked.build("first", "--write-lock").expect(0);
        locked
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn build(&self, out: &str, flag: &str) -> Run {
        let (recipe, source) = (self.path("test.toml"), self.path("source"));
        finish(command(crate::args!["build", recipe, "--source", source, "-o", self.path(out), flag]))
    }

    #[track_caller]
    fn differs(&self, out: &str, words: &[&str]) {
        let lock = fs::read(self.path("test.lock")).unwrap();
        let run = self.build(out, "--locked").expect(1);
        assert!(run.stderr.contains("test.lock` does not hold:\n--- lock\n+++ found\n"), "{}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "`{word}` is not in:\n{}", run.stderr);
        }
        assert_eq!(fs::read(self.path("test.lock")).unwrap(), lock, "a locked build never writes the lock");
    }
}

fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

#[test]
fn an_unchanged_build_holds_its_lock() {
    let locked = Locked::new();
    let run = locked.build("second", "--locked").expect(0);
    assert!(!run.stderr.contains("does not hold"), "{}", run.stderr);
    let first = fs::read(locked.path("first/provenance.json")).unwrap();
    assert_eq!(fs::read(locked.path("second/provenance.json")).unwrap(), first);
    // Writing the lock again gives the same text.
    let lock = fs::read_to_string(locked.path("test.lock")).unwrap();
    locked.build("third", "--write-lock").expect(0);
    assert_eq!(fs::read_to_string(locked.path("test.lock")).unwrap(), lock);
}

#[test]
fn one_changed_weight_breaks_the_lock() {
    let mut locked = Locked::new();
    locked.model.tensor("model.layers.0.mlp.up_proj.weight").bytes[10] ^= 1;
    locked.model.write(&locked.path("source"));
    locked.differs(
        "second",
        &["- source ", "+ source ", "- artifact ", "the source changed; so did the artifact"],
    );
    assert!(!exists(&locked.path("second")), "what the lock does not hold for is not published");
    assert!(!exists(&locked.path(".second.building")));
}

#[test]
fn a_changed_recipe_breaks_the_lock_before_any_work() {
    let locked = Locked::new();
    recipe(locked.dir.path(), &format!("{}# a remark\n", default_codec(AFFINE_4_32)));
    locked.differs("second", &["- recipe ", "+ recipe ", "the recipe changed"]);
    assert!(!exists(&locked.path("second")));
    assert!(!exists(&locked.path(".second.building")));
}

#[test]
fn a_changed_tokenizer_breaks_the_lock() {
    let mut locked = Locked::new();
    locked.model.files.get_mut("tokenizer.json").unwrap().push(b'\n');
    locked.model.write(&locked.path("source"));
    locked.differs("second", &["- tokenizer ", "the tokenizer changed; so did the artifact"]);
}

#[test]
fn a_changed_config_breaks_the_lock_and_is_named() {
    let mut locked = Locked::new();
    locked.model.config["rms_norm_eps"] = serde_json::json!(1e-6);
    locked.model.write(&locked.path("source"));
    locked.differs("second", &["the source changed; so did the artifact"]);
}

#[test]
fn a_damaged_lock_is_refused_with_its_place() {
    let locked = Locked::new();
    let text = fs::read_to_string(locked.path("test.lock")).unwrap();
    fs::write(locked.path("test.lock"), text.replace("artifact = \"", "artifact = \"xyz")).unwrap();
    let run = locked.build("second", "--locked").expect(2);
    for word in ["test.lock:", "artifact", "--write-lock"] {
        assert!(run.stderr.contains(word), "`{word}` is not in:\n{}", run.stderr);
    }
    // As the message says, it can be written anew.
    locked.build("third", "--write-lock").expect(0);
    assert_eq!(fs::read_to_string(locked.path("test.lock")).unwrap(), text);
    assert!(!exists(&locked.path("second")));
}
