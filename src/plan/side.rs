//! The artifact's files that are not weights: configs, index, card, and what is copied from the source.

use std::path::{Path, PathBuf};

use super::{Module, Note, NoteKind, PlanError, Sizes, SourceFolder};
use crate::arch::{Arch, Config, Folder, Model, Role};
use crate::artifact::card::{Card, CardRow, card};
use crate::artifact::config::{index, pretty_json, quantization, with_quantization};
use crate::artifact::layout::OutputFile;
use crate::checkpoint::{Links, SMALL_LIMIT, read_small};
use crate::codec::CodecSpec;
use crate::digest::Digest;
use crate::failure::Outcome;
use crate::recipe::Recipe;
use crate::tool::Tool;
use crate::units::Bytes;

/// A generated file.
#[derive(Debug, Clone)]
pub struct SideFile {
    /// Path relative to the artifact.
    pub name: String,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// A file that goes from the source to the artifact unchanged.
#[derive(Debug, Clone)]
pub struct CopiedFile {
    /// Name in both folders.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Its digest when the plan was made.
    pub sha256: Digest,
    /// Whether it decides how text becomes tokens.
    pub tokenizer: bool,
}

/// Files that are copied if they are there; the second word says whether they belong to the tokenizer.
const COPIED: &[(&str, bool)] = &[
    ("added_tokens.json", true),
    ("chat_template.jinja", true),
    ("chat_template.json", true),
    ("generation_config.json", false),
    ("LICENSE", false),
    ("LICENSE.md", false),
    ("LICENSE.txt", false),
    ("merges.txt", true),
    ("NOTICE", false),
    ("preprocessor_config.json", false),
    ("processor_config.json", false),
    ("special_tokens_map.json", true),
    ("tokenizer.json", true),
    ("tokenizer.model", true),
    ("tokenizer_config.json", true),
    ("video_preprocessor_config.json", false),
    ("vocab.json", true),
];

/// Finds and digests the files that are copied.
pub(crate) fn copied(dir: &Path, notes: &mut Vec<Note>) -> Outcome<Vec<CopiedFile>> {
    let links = Links::of_folder(dir);
    let mut files = Vec::new();
    for (name, tokenizer) in COPIED {
        let path = dir.join(name);
        if path.symlink_metadata().is_err() {
            continue;
        }
        let content = read_small(&path, &links, SMALL_LIMIT)?;
        if name.ends_with(".json")
            && let Err(error) = serde_json::from_slice::<serde::de::IgnoredAny>(&content)
        {
            return Err(PlanError::NotJson { file: path, problem: error.to_string() }.into());
        }
        let (bytes, sha256) = (content.len() as u64, Digest::of(&content));
        files.push(CopiedFile { name: (*name).to_owned(), path, bytes, sha256, tokenizer: *tokenizer });
    }
    let has = |name: &str| files.iter().any(|file| file.name == name);
    if !has("tokenizer.json") && !has("tokenizer.model") {
        notes.push(Note {
            kind: NoteKind::MissingFile,
            subject: "tokenizer.json".to_owned(),
            detail: "is not in the source: the artifact cannot turn text into tokens".to_owned(),
        });
    }
    Ok(files)
}

/// Notes what the config promises and the checkpoint does not hold, and models that never stop.
pub(super) fn note_absent_parts(
    dir: &Path,
    config: &Config,
    modules: &[Module],
    copied: &[CopiedFile],
    notes: &mut Vec<Note>,
) {
    let any = |role: &[Role]| modules.iter().any(|module| role.contains(&module.output.role));
    let draft = config.text().get("mtp_num_hidden_layers").and_then(|value| value.as_u64()).unwrap_or(0);
    let mut absent = |subject: &str, detail: &str| {
        notes.push(Note {
            kind: NoteKind::AbsentPart,
            subject: subject.to_owned(),
            detail: detail.to_owned(),
        });
    };
    if draft > 0 && !any(&[Role::Draft, Role::DraftLinear]) {
        absent(
            "mtp",
            match dir.join("mtp").is_dir() {
                true => {
                    "is a folder beside the checkpoint, which is not read: build from the original checkpoint"
                }
                false => "is promised by the config, but the checkpoint holds no draft head",
            },
        );
    }
    if config.root().get("vision_config").is_some_and(|value| value.is_object()) && !any(&[Role::Vision]) {
        absent("vision_tower", "is promised by the config, but the checkpoint holds no vision tower");
    }
    let declares_end = config.root().get("eos_token_id").is_some_and(|value| !value.is_null())
        || config.text().get("eos_token_id").is_some();
    if !declares_end && !copied.iter().any(|file| file.name == "generation_config.json") {
        absent(
            "eos_token_id",
            "is in neither `config.json` nor `generation_config.json`: the model may never stop",
        );
    }
}

/// Configs, index and card.
#[allow(clippy::too_many_arguments)]
pub(super) fn generate(
    recipe: &Recipe,
    source: &SourceFolder,
    config: &Config,
    arch: &dyn Arch,
    model: &Model,
    modules: &[Module],
    files: &[OutputFile],
    sizes: &Sizes,
) -> Vec<SideFile> {
    let matrices = |folder: Folder| {
        let prefix = if folder == Folder::Mtp { "mtp." } else { "" };
        modules.iter().filter(move |m| m.output.folder == folder && m.output.role.quantizable()).map(
            move |m| (m.output.module.strip_prefix(prefix).unwrap_or(&m.output.module), m.assignment.codec),
        )
    };
    let main = with_quantization(
        arch.output_config(config, model),
        quantization(matrices(Folder::Main), recipe.default.codec),
    );
    let mut side = vec![SideFile { name: "config.json".to_owned(), bytes: pretty_json(&main) }];
    let draft = modules.iter().any(|module| module.output.folder == Folder::Mtp);
    if draft && let Some(config) = arch.draft_config(config, model) {
        let config = with_quantization(config, quantization(matrices(Folder::Mtp), CodecSpec::Keep));
        side.push(SideFile { name: "mtp/config.json".to_owned(), bytes: pretty_json(&config) });
    }
    let main_modules = || modules.iter().filter(|module| module.output.folder == Folder::Main);
    let tensors = main_modules().flat_map(|module| {
        let places = module.stored.iter().zip(&module.places);
        places.map(|(plane, place)| (plane.name.as_str(), files[place.file].name.as_str(), plane.bytes))
    });
    let weights = main_modules().map(Module::weights).sum();
    side.push(SideFile { name: crate::checkpoint::INDEX.to_owned(), bytes: index(tensors, weights) });

    let tool = Tool::this();
    let recipe_files: Vec<(String, String)> =
        recipe.files.iter().map(|file| (file.name(), file.text.clone())).collect();
    let bytes = card(&Card {
        name: &recipe.name,
        description: recipe.description.as_deref(),
        base_model: source.hub.as_ref().map(|hub| hub.repo.as_str()).or(recipe.base_model.as_deref()),
        revision: source.hub.as_ref().map(|hub| hub.revision.as_str()),
        model_type: &model.model_type,
        weights: sizes.weights,
        bytes: Bytes(sizes.weight_file_bytes),
        bits_per_weight: sizes.bits_per_weight,
        rows: &card_rows(modules),
        layout: model.target,
        quantized: sizes.quantized_weights > 0,
        draft,
        recipe: &recipe_files,
        tool: format!("{} {}", tool.name, tool.version),
    });
    side.push(SideFile { name: "README.md".to_owned(), bytes });
    side
}

/// Modules by codec and encoder, quantized ones first.
fn card_rows(modules: &[Module]) -> Vec<CardRow> {
    let mut rows: std::collections::BTreeMap<(bool, String), CardRow> = Default::default();
    for module in modules {
        let codec = module.assignment.codec;
        let name = match codec.quantizes() {
            true => format!("{codec} ({})", module.assignment.encoder),
            false => format!("{}", module.stored[0].dtype),
        };
        let row = rows.entry((!codec.quantizes(), name.clone())).or_insert_with(|| CardRow {
            codec: name,
            modules: 0,
            weights: 0,
            bytes: Bytes(0),
        });
        row.modules += 1;
        row.weights += module.weights();
        row.bytes.0 += module.bytes();
    }
    rows.into_values().collect()
}
