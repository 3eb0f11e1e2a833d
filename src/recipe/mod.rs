//! What to build: which checkpoint, which codec for which modules, where to.
//!
//! A recipe is a TOML file, and the files that it `extends`. [`Recipe::load`] reads them all, checks
//! everything that can be checked without a checkpoint, and reports every mistake at once, each with
//! file, line, column and a caret. `docs/recipes.md` is the user's description; [`keys::KEYS`] is
//! the list of keys that it, the parser and the suggestions share.
//!
//! Files are joined like this. A key of a recipe wins over the same key of its base; `source` counts
//! as one key, and so do `transform.rotation`, `default.codec` together with `default.encoder`, and the two sizes that a
//! `budget` may have. Rules of a recipe come
//! before those of its base, and a base's rule that could then match nothing (the same pattern again,
//! or anything after a bare `*`) is dropped. `keep` adds up. `name`, `description` and
//! `output.directory` belong to one artifact and are not inherited.

mod calibration;
mod budget;
mod dom;
mod error;
pub mod keys;
mod lock;
mod pattern;
mod sheet;
mod text;
mod transform;

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use self::budget::{
    Budget, BudgetMethod, BudgetOrigins, BudgetSize, Control, Limit, Weights as BudgetWeights,
};
pub use self::calibration::{Activations, Calibration, FewTokens, GptqChoice, Packing};
pub use self::error::{CODECS, FileProblem, Mistake, RecipeError};
pub use self::lock::{Difference, Lock, LockError, LockMistake, differences_text};
pub use self::pattern::{BadPattern, Pattern, Scope};
pub use self::text::{Located, Origin, RecipeFile};
pub use self::transform::{OPTROT_STEPS, ROTATION_SEED, RotationChoice, RotationKind, Transforms};

use self::dom::{Problem, Report};
use self::sheet::{Sheet, base_of, check_encoder};
use crate::codec::CodecSpec;
use crate::digest::{Digest, Hasher};
use crate::failure::Problems;
use crate::quant::{ENCODERS, GPTQ, GPTQ_REFIT, LDLQ, TRELLIS};
use crate::tensor::Layout;
use crate::units::Bytes;

/// The most bytes a recipe file may have.
const LARGEST: Bytes = Bytes::mib(1);

/// The most files that may extend each other.
const DEEPEST: usize = 8;

/// The most mistakes that are shown one by one; a file with more is not a recipe.
const SHOWN: usize = 100;

/// The pipeline of a recipe that names none.
const PIPELINE: &str = "rtn";

/// A recipe, joined with its bases.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// The artifact's name; safe as a folder's.
    pub name: String,
    /// One line for the model card.
    pub description: Option<String>,
    /// Repository of the original model, for the card, if the source is not from the hub.
    pub base_model: Option<String>,
    /// The checkpoint, unless the command line gives it.
    pub source: Option<Source>,
    /// The name of the stage list.
    pub pipeline: String,
    /// What a tensor takes that no rule matches.
    pub default: Choice,
    /// First match wins.
    pub rules: Vec<Rule>,
    /// Bounds on what the budget gives; first match wins.
    pub limits: Vec<Limit>,
    /// How many bytes the weights may take.
    pub budget: Option<Budget>,
    /// Tensors of unknown role that are stored as they are.
    pub keep: Vec<KeepPattern>,
    /// Changes of basis.
    pub transform: Transforms,
    /// The text that weighs errors.
    pub calibration: Calibration,
    /// How rounding under second moments goes about it.
    pub gptq: GptqChoice,
    /// Where to, and how split.
    pub output: Output,
    /// Where stages that draw random numbers start.
    pub seed: u64,
    /// The texts: the base of all first, this recipe last.
    pub files: Vec<RecipeFile>,
    /// Where single values are stated, for later messages.
    pub origins: Origins,
}

/// Where a checkpoint comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder, as written; [`Recipe::source_path`] resolves it.
    Path(PathBuf),
    /// A Hugging Face repository at one commit.
    Hub {
        /// `org/name`.
        repo: String,
        /// 40 lower-case hexadecimal digits.
        revision: String,
    },
}

/// What a weight becomes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Choice {
    /// How it is stored.
    pub codec: CodecSpec,
    /// How codes are found, if stated: one of [`ENCODERS`]. See [`Recipe::encoder`].
    pub encoder: Option<String>,
}

impl fmt::Display for Choice {
    /// `affine-4g64`, or `affine-4g64 (refit)` where an encoder is stated.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.encoder {
            Some(encoder) => write!(f, "{} ({encoder})", self.codec),
            None => write!(f, "{}", self.codec),
        }
    }
}

/// A choice for the modules that match.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Over module names, as MLX has them.
    pub pattern: Pattern,
    /// What they become.
    pub choice: Choice,
    /// Where the pattern is written.
    pub origin: Origin,
    /// Where the codec is written.
    pub codec_origin: Origin,
}

impl Rule {
    /// Whether this rule, standing first, leaves nothing for `later`.
    fn hides(&self, later: &Pattern) -> bool {
        self.pattern == *later || (self.pattern.is_everything() && later.scope() == Scope::Trunk)
    }
}

/// Tensors to store as they are.
#[derive(Debug, Clone)]
pub struct KeepPattern {
    /// Over the source's tensor names.
    pub pattern: Pattern,
    /// Where it is written.
    pub origin: Origin,
}

/// Where the artifact goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its folder, as written; [`Recipe::output_directory`] resolves it.
    pub directory: Option<PathBuf>,
    /// The most bytes of a weight file.
    pub shard_size: Bytes,
    /// Names and shapes of what is written.
    pub layout: Layout,
}

/// Where single values are stated; `None` if nowhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Origins {
    /// `source.path` or `source.hub`.
    pub source: Option<Origin>,
    /// `pipeline`.
    pub pipeline: Option<Origin>,
    /// `default.codec`.
    pub default_codec: Option<Origin>,
    /// `output.directory`.
    pub directory: Option<Origin>,
    /// `output.layout`.
    pub layout: Option<Origin>,
}

/// Whether `encoder` can fill `codec`: `trellis` and `ldlq` fill the trellis, `mlx` all others that quantize, the rest
/// only affine.
fn encoder_fills(encoder: &str, codec: CodecSpec) -> bool {
    match codec {
        CodecSpec::Trellis(_) => matches!(encoder, TRELLIS | LDLQ),
        CodecSpec::Affine { .. } => !matches!(encoder, TRELLIS | LDLQ),
        _ => codec.quantizes() && encoder == ENCODERS[0],
    }
}

/// What does for the other codec what `encoder` does for its own.
fn alike(encoder: &str) -> Option<&'static str> {
    match encoder {
        LDLQ => Some(GPTQ_REFIT),
        TRELLIS => Some("refit"),
        GPTQ | GPTQ_REFIT => Some(LDLQ),
        _ => None,
    }
}

/// [`Recipe::digest`] of a recipe whose files have these texts.
pub fn digest_of_texts<'a>(texts: impl Iterator<Item = &'a str>) -> Digest {
    let mut hasher = Hasher::default();
    for text in texts {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    hasher.finish()
}

impl Recipe {
    /// Reads `path` and every file that it extends. `pipelines` are the names `pipeline` may have.
    ///
    /// # Errors
    /// Every [`RecipeError`] of every file: this recipe's first, then its base's, in order of line.
    pub fn load(path: &Path, pipelines: &[&str]) -> Result<Self, Problems<RecipeError>> {
        let chain = Chain::follow(path)?;
        Self::join(chain.files, chain.problems, chain.broken, pipelines)
    }

    /// Reads texts that are already at hand: the base of all first, each followed by the one that
    /// extends it. This is how a recipe is read back from an artifact's provenance.
    ///
    /// # Errors
    /// As [`Recipe::load`]; and [`Mistake::BaseNotGiven`] and [`Mistake::BaseNotAsked`] if the texts
    /// are not such a chain.
    ///
    /// # Panics
    /// If `files` is empty.
    pub fn parse(files: Vec<RecipeFile>, pipelines: &[&str]) -> Result<Self, Problems<RecipeError>> {
        assert!(!files.is_empty(), "a recipe has at least one file");
        let mut problems = Vec::new();
        for (file, text) in files.iter().enumerate() {
            let (at, mistake) = match base_of(&text.text) {
                Some((_, span)) if file == 0 => (span, Mistake::BaseNotGiven),
                None if file > 0 => (0..0, Mistake::BaseNotAsked),
                _ => continue,
            };
            problems.push(Problem { at: Origin { file, start: at.start, end: at.end }, mistake });
        }
        Self::join(files, problems, Vec::new(), pipelines)
    }

    fn join(
        files: Vec<RecipeFile>,
        mut problems: Vec<Problem>,
        broken: Vec<RecipeError>,
        pipelines: &[&str],
    ) -> Result<Self, Problems<RecipeError>> {
        // This recipe first, so that the first statement met is the one that counts.
        let mut sheets = Vec::new();
        for (file, text) in files.iter().enumerate().rev() {
            let mut report = Report { file, problems: Vec::new() };
            sheets.push(Sheet::read(text, pipelines, &mut report));
            problems.append(&mut report.problems);
        }
        let own = &sheets[0];

        let stating = sheets.iter().position(|sheet| sheet.states_codec);
        let codec = stating.and_then(|at| sheets[at].codec.clone());
        let encoder = sheets.iter().take(stating.map_or(0, |at| at + 1)).find_map(|s| s.encoder.clone());
        let last = files.len() - 1;
        let mut report = Report { file: last, problems: Vec::new() };
        // A base that could not be read may be the one that states it.
        let hidden = !broken.is_empty() || problems.iter().any(|p| p.mistake.hides_base());
        if stating.is_none() && !hidden {
            let key = "codec";
            let at = own.default_at.unwrap_or(report.origin(0..0));
            report.add(at, Mistake::MissingKey { key, section: keys::Section::Default });
        }
        if let (Some(codec), Some(encoder)) = (&codec, &encoder) {
            check_encoder(codec.value, encoder, &mut report);
        }
        let transform = transform::join(sheets.iter().map(|sheet| &sheet.transform), &mut report);
        let budget = budget::join(sheets.iter().map(|sheet| &sheet.budget), hidden, &mut report);
        let (calibration, gptq) = calibration::join(sheets.iter().map(|sheet| &sheet.calibration));
        if let (Some(at), Activations::Sequential) = (calibration.hessians_origin, calibration.activations) {
            report.add(at, Mistake::SequentialFile);
        }
        problems.append(&mut report.problems);

        let source = sheets.iter().find_map(|sheet| sheet.source.clone());
        let pipeline = sheets.iter().find_map(|sheet| sheet.pipeline.clone());
        let mut rules: Vec<Rule> = Vec::new();
        let mut limits: Vec<Limit> = Vec::new();
        let mut keep: Vec<KeepPattern> = Vec::new();
        for sheet in &sheets {
            for limit in &sheet.limits {
                if !limits.iter().any(|first| first.pattern == limit.pattern) {
                    limits.push(limit.clone());
                }
            }
            let earlier = rules.len();
            for rule in &sheet.rules {
                if !rules[..earlier].iter().any(|first| first.hides(&rule.pattern)) {
                    rules.push(rule.clone());
                }
            }
            for kept in &sheet.keep {
                if !keep.iter().any(|earlier| earlier.pattern == kept.pattern) {
                    keep.push(kept.clone());
                }
            }
        }
        let stated = sheets.iter().any(|sheet| sheet.budget.at.is_some());
        if let Some(limit) = limits.first()
            && !stated
            && !hidden
        {
            let pattern = limit.pattern.as_str().to_owned();
            problems.push(Problem { at: limit.origin, mistake: Mistake::LimitWithoutBudget { pattern } });
        }
        let layout = sheets.iter().find_map(|sheet| sheet.layout.as_ref());
        let output = Output {
            directory: own.directory.as_ref().map(|directory| directory.value.clone()),
            shard_size: sheets.iter().find_map(|sheet| sheet.shard_size).unwrap_or(Bytes(5_000_000_000)),
            layout: layout.map(|layout| layout.value).unwrap_or_default(),
        };
        let origins = Origins {
            source: source.as_ref().map(|source| source.at),
            pipeline: pipeline.as_ref().map(|pipeline| pipeline.at),
            default_codec: codec.as_ref().map(|codec| codec.at),
            directory: own.directory.as_ref().map(|directory| directory.at),
            layout: layout.map(|layout| layout.at),
        };
        let seed = sheets.iter().find_map(|sheet| sheet.seed).unwrap_or(0);
        let (name, description) = (own.name.clone(), own.description.clone());
        let base_model = own.base_model.clone();

        problems.sort_by_key(|problem| (last - problem.at.file, problem.at.start, problem.at.end));
        if problems.len() > SHOWN {
            let count = problems.len() - SHOWN;
            problems.truncate(SHOWN + 1);
            problems[SHOWN].mistake = Mistake::More { count };
        }
        let located = problems.into_iter().map(|problem| locate(&files, problem.at, problem.mistake));
        let name_and_codec = Problems::none_or(located.chain(broken).collect(), name.zip(codec))?;
        let (name, codec) = name_and_codec.expect("a recipe without a name or a codec has a problem");
        Ok(Self {
            name,
            description,
            base_model,
            source: source.map(|source| source.value),
            pipeline: pipeline.map_or_else(|| PIPELINE.to_owned(), |pipeline| pipeline.value),
            default: Choice { codec: codec.value, encoder: encoder.map(|encoder| encoder.value) },
            rules,
            limits,
            budget,
            keep,
            transform,
            calibration,
            gptq,
            output,
            seed,
            origins,
            files,
        })
    }

    /// The digest of all texts in order, each preceded by its length in bytes as 8 little-endian bytes.
    pub fn digest(&self) -> Digest {
        digest_of_texts(self.files.iter().map(|file| file.text.as_str()))
    }

    /// Whether `[keep]` names the source's tensor.
    pub fn keeps(&self, tensor: &str) -> bool {
        self.keep.iter().any(|keep| keep.pattern.matches(tensor))
    }

    /// The first rule that matches `module`, and its index.
    pub fn rule_for(&self, module: &str) -> Option<(usize, &Rule)> {
        self.rules.iter().enumerate().find(|(_, rule)| rule.pattern.matches(module))
    }

    /// The encoder of `choice`: its own, else the default's or its [like](alike) if that can fill the codec, else `mlx` or
    /// `trellis`; `None` if the codec stores floats.
    pub fn encoder<'a>(&'a self, choice: &'a Choice) -> Option<&'a str> {
        let stated = [&choice.encoder, &self.default.encoder].into_iter().flatten().map(String::as_str);
        let like = self.default.encoder.as_deref().and_then(alike);
        let all = stated.chain(like).chain([ENCODERS[0], TRELLIS]);
        all.into_iter().find(|encoder| encoder_fills(encoder, choice.codec))
    }

    /// The source's folder, from the folder of the file that states it; `None` for other sources.
    pub fn source_path(&self) -> Option<PathBuf> {
        match (&self.source, self.origins.source) {
            (Some(Source::Path(written)), Some(origin)) => Some(self.resolve(written, origin)),
            _ => None,
        }
    }

    /// The recipe with its basis decided: one of [`Transforms::CANDIDATES`].
    pub fn with_basis(mut self, basis: &str) -> Self {
        self.transform = self.transform.with_basis(basis);
        self
    }

    /// The recipe with its codecs as they are before a budget is spent.
    pub fn without_budget(mut self) -> Self {
        (self.budget, self.limits) = (None, Vec::new());
        self
    }

    /// The recipe with the file that it calibrates with, a text or second moments, in another place.
    pub fn with_calibration(mut self, file: &Path) -> Self {
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let calibration = &mut self.calibration;
        let named =
            if calibration.hessians.is_some() { &mut calibration.hessians } else { &mut calibration.text };
        if named.is_some() {
            *named = Some(file);
        }
        self
    }

    /// The text that [`RotationKind::Measure`] scores on, from the folder of the file that states it.
    pub fn transform_text(&self) -> Option<PathBuf> {
        Some(self.resolve(self.transform.text.as_ref()?, self.transform.text_origin?))
    }

    /// The text to calibrate on, from the folder of the file that states it; `None` for the built-in one.
    pub fn calibration_text(&self) -> Option<PathBuf> {
        Some(self.resolve(self.calibration.text.as_ref()?, self.calibration.text_origin?))
    }

    /// The file of second moments to use, from the folder of the file that states it.
    pub fn calibration_hessians(&self) -> Option<PathBuf> {
        Some(self.resolve(self.calibration.hessians.as_ref()?, self.calibration.hessians_origin?))
    }

    /// The budget's file of costs, from the folder of the file that states it.
    pub fn sensitivity(&self) -> Option<PathBuf> {
        let budget = self.budget.as_ref()?;
        Some(self.resolve(&budget.sensitivity, budget.origins.sensitivity))
    }

    /// The text that a budget's choice is compared on, from the folder of the file that states it.
    pub fn budget_text(&self) -> Option<PathBuf> {
        let budget = self.budget.as_ref()?;
        Some(self.resolve(budget.text.as_ref()?, budget.origins.text?))
    }

    /// The artifact's folder, from the folder of the file that states it.
    pub fn output_directory(&self) -> Option<PathBuf> {
        Some(self.resolve(self.output.directory.as_ref()?, self.origins.directory?))
    }

    fn resolve(&self, written: &Path, origin: Origin) -> PathBuf {
        beside(&self.files[origin.file].path, written)
    }

    /// A mistake found later at a place of this recipe (a rule that matches nothing, a group that does
    /// not divide), shown as the parser shows its own.
    pub fn problem(&self, origin: &Origin, message: String, help: Option<String>) -> RecipeError {
        locate(&self.files, *origin, Mistake::Plan { message, help })
    }
}

fn locate(files: &[RecipeFile], at: Origin, mistake: Mistake) -> RecipeError {
    let file = &files[at.file];
    RecipeError::Text(Box::new(Located::new(&file.path, &file.text, at.start..at.end, mistake)))
}

/// `written` in `file`: relative paths start at the file's folder.
fn beside(file: &Path, written: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new("")).join(written)
}

/// The files that a recipe leads to.
struct Chain {
    /// The base of all first.
    files: Vec<RecipeFile>,
    /// What is wrong with the `extends` of some.
    problems: Vec<Problem>,
    /// Files that are there but are not text.
    broken: Vec<RecipeError>,
}

impl Chain {
    /// Reads `path`, its base, its base's base and so on.
    fn follow(path: &Path) -> Result<Self, RecipeError> {
        let mut files = vec![read(path)??];
        let mut seen = vec![identity(path)];
        let mut broken = Vec::new();
        let mut trouble = None;
        while let Some((written, span)) = base_of(&files[files.len() - 1].text) {
            let next = beside(&files[files.len() - 1].path, &written);
            let mistake = if seen.contains(&identity(&next)) {
                Mistake::Cycle { path: next }
            } else if files.len() > DEEPEST {
                Mistake::TooDeep { limit: DEEPEST }
            } else {
                seen.push(identity(&next));
                match read(&next) {
                    Ok(Ok(file)) => {
                        files.push(file);
                        continue;
                    }
                    Ok(Err(error)) => {
                        broken.push(error);
                        break;
                    }
                    Err(problem) => Mistake::Base(problem),
                }
            };
            trouble = Some((span, mistake));
            break;
        }
        // Whatever is wrong is wrong with the `extends` of the last file read, which is now the first.
        files.reverse();
        let problems = trouble
            .map(|(span, mistake)| Problem {
                at: Origin { file: 0, start: span.start, end: span.end },
                mistake,
            })
            .into_iter()
            .collect();
        Ok(Self { files, problems, broken })
    }
}

/// What tells two paths to one file from two files.
fn identity(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// The file as text; the inner error is that it is not.
fn read(path: &Path) -> Result<Result<RecipeFile, RecipeError>, FileProblem> {
    let path = path.to_owned();
    let mut bytes = Vec::new();
    let taken = File::open(&path).and_then(|file| file.take(LARGEST.0 + 1).read_to_end(&mut bytes));
    match taken {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let near = similar_file(&path);
            return Err(FileProblem::Absent { path, near });
        }
        Err(error) => return Err(FileProblem::Unreadable { path, error }),
        Ok(_) if bytes.len() as u64 > LARGEST.0 => {
            return Err(FileProblem::TooLarge { path, limit: LARGEST });
        }
        Ok(_) => {}
    }
    Ok(match String::from_utf8(bytes) {
        Ok(text) => Ok(RecipeFile { path, text }),
        Err(error) => {
            let offset = error.utf8_error().valid_up_to();
            // Bytes before the first bad one keep their places.
            let text = String::from_utf8_lossy(error.as_bytes());
            let mistake = Mistake::NotUtf8 { offset };
            Err(Box::new(Located::new(&path, &text, offset..offset + 1, mistake)).into())
        }
    })
}

/// A recipe beside `path` whose name is close to it, as `demo` and `dmeo.toml` are to `demo.toml`.
fn similar_file(path: &Path) -> Option<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut recipes: Vec<PathBuf> = std::fs::read_dir(folder.unwrap_or(Path::new(".")))
        .ok()?
        .filter_map(|entry| Some(folder.unwrap_or(Path::new("")).join(entry.ok()?.file_name())))
        .filter(|file| file.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    recipes.sort();
    let stems: Vec<&str> = recipes.iter().filter_map(|file| file.file_stem()?.to_str()).collect();
    let near = text::nearest(path.file_stem()?.to_str()?, stems)?;
    recipes.iter().find(|file| file.file_stem().is_some_and(|stem| stem == near)).cloned()
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    const PIPELINES: &[&str] = &["rtn", "other"];

    fn file(path: &str, text: &str) -> RecipeFile {
        RecipeFile { path: path.into(), text: text.into() }
    }

    fn joined(texts: &[&str]) -> Recipe {
        let files = texts.iter().enumerate().map(|(i, text)| file(&format!("f{i}/r.toml"), text)).collect();
        Recipe::parse(files, PIPELINES).unwrap_or_else(|problems| panic!("{problems}"))
    }

    fn rules(recipe: &Recipe) -> Vec<(&str, String)> {
        recipe.rules.iter().map(|rule| (rule.pattern.as_str(), rule.choice.to_string())).collect()
    }

    #[test]
    fn the_names_of_codecs_are_those_of_the_codec_type() {
        let name: serde::de::value::StrDeserializer<'_, serde::de::value::Error> =
            serde::de::IntoDeserializer::into_deserializer("no-such-codec");
        let message = CodecSpec::deserialize(name).unwrap_err().to_string();
        let (_, known) = message.split_once("expected one of ").unwrap();
        let known: Vec<&str> = known.split(", ").map(|name| name.trim_matches('`')).collect();
        assert_eq!(known, CODECS);
    }

    #[test]
    fn every_codec_can_be_written() {
        for codec in CODECS {
            let written = match *codec {
                "affine" => "{ affine = { bits = 5, group = 32 } }".to_owned(),
                "trellis" => "{ trellis = { bits = 3, states = 14 } }".to_owned(),
                name => format!("\"{name}\""),
            };
            let recipe = joined(&[&format!("name = 'x'\ndefault.codec = {written}")]);
            let expected = match *codec {
                "affine" => "affine-5g32",
                "trellis" => "trellis-3-L14",
                name => name,
            };
            assert_eq!(recipe.default.codec.to_string(), expected);
        }
        let dotted = joined(&["name = 'x'\n[default]\ncodec.affine.bits = 3\ncodec.affine.group = 128"]);
        assert_eq!(dotted.default.codec.to_string(), "affine-3g128");
    }

    #[test]
    fn what_is_not_stated_has_its_default() {
        let recipe = joined(&["name = 'x'\ndefault.codec = 'mxfp4'"]);
        assert_eq!((recipe.pipeline.as_str(), recipe.seed), ("rtn", 0));
        assert_eq!(
            recipe.output,
            Output { directory: None, shard_size: Bytes(5_000_000_000), layout: Layout::Mlx }
        );
        assert_eq!((recipe.source, recipe.description), (None, None));
        assert!(recipe.rules.is_empty() && recipe.keep.is_empty());
    }

    #[test]
    fn a_recipe_wins_over_its_base_key_by_key() {
        let recipe = joined(&[
            "name = 'base'\ndescription = 'b'\nseed = 1\npipeline = 'other'\nsource.path = 'models/m'\n\
             default.codec = 'mxfp4'\noutput = { directory = 'there', shard-size = '1GB' }\nkeep.tensors = ['*.b', '*.c']",
            "name = 'child'\nextends = 'x'\nseed = 2\nkeep.tensors = ['*.a', '*.b']",
        ]);
        assert_eq!((recipe.name.as_str(), recipe.description.as_deref()), ("child", None));
        assert_eq!((recipe.seed, recipe.pipeline.as_str()), (2, "other"));
        assert_eq!(recipe.default.codec, CodecSpec::Mxfp4);
        assert_eq!(
            recipe.output,
            Output { directory: None, shard_size: Bytes(1_000_000_000), layout: Layout::Mlx }
        );
        let kept: Vec<&str> = recipe.keep.iter().map(|keep| keep.pattern.as_str()).collect();
        assert_eq!(kept, ["*.a", "*.b", "*.c"]);
        // The source is stated by the base, so it starts at the base's folder.
        assert_eq!(recipe.source, Some(Source::Path("models/m".into())));
        assert_eq!(recipe.source_path(), Some("f0/models/m".into()));
        assert_eq!(recipe.output_directory(), None);
    }

    #[test]
    fn a_source_is_replaced_whole() {
        let commit = "0123456789ABCDEF0123456789abcdef01234567";
        let recipe = joined(&[
            "name = 'base'\nsource.path = 'models/m'\ndefault.codec = 'mxfp4'",
            &format!("name = 'child'\nextends = 'x'\nsource = {{ hub = 'org/n', revision = '{commit}' }}"),
        ]);
        let expected = Source::Hub { repo: "org/n".into(), revision: commit.to_lowercase() };
        assert_eq!(recipe.source, Some(expected));
        assert_eq!(recipe.source_path(), None);
    }

    #[test]
    fn rules_come_before_the_bases_and_replace_those_they_hide() {
        let base = "name = 'base'\ndefault.codec = 'mxfp4'\n[[rule]]\nmatch = '*.a'\ncodec = 'nvfp4'\n\
                    [[rule]]\nmatch = '*.b'\ncodec = 'nvfp4'\n[[rule]]\nmatch = 'mtp.*'\ncodec = 'f16'\n";
        let middle = "name = 'middle'\nextends = 'x'\n[[rule]]\nmatch = '*.b'\ncodec = 'mxfp8'\n";
        let child = "name = 'child'\nextends = 'x'\n[[rule]]\nmatch = '*.c'\ncodec = 'bf16'\n";
        assert_eq!(
            rules(&joined(&[base, middle, child])),
            [
                ("*.c", "bf16".to_owned()),
                ("*.b", "mxfp8".to_owned()),
                ("*.a", "nvfp4".to_owned()),
                ("mtp.*", "f16".to_owned())
            ]
        );
        let all = "name = 'child'\nextends = 'x'\n[[rule]]\nmatch = '*'\ncodec = 'bf16'\n";
        assert_eq!(rules(&joined(&[base, all])), [("*", "bf16".to_owned()), ("mtp.*", "f16".to_owned())]);
    }

    #[test]
    fn stating_a_codec_drops_the_bases_encoder_but_not_the_other_way_round() {
        let affine = "name = 'base'\n[default]\ncodec.affine = { bits = 4, group = 64 }\nencoder = 'refit'";
        let codec = "name = 'child'\nextends = 'x'\ndefault.codec = 'mxfp4'";
        assert_eq!(joined(&[affine, codec]).default.to_string(), "mxfp4");
        let encoder = "name = 'child'\nextends = 'x'\ndefault.encoder = 'mlx'";
        assert_eq!(joined(&[affine, encoder]).default.to_string(), "affine-4g64 (mlx)");
        let neither = "name = 'child'\nextends = 'x'";
        assert_eq!(joined(&[affine, neither]).default.to_string(), "affine-4g64 (refit)");
    }

    #[test]
    fn an_encoder_comes_from_the_rule_then_the_default_then_is_mlx() {
        let recipe = joined(&["name = 'x'\n\
             [default]\ncodec.affine = { bits = 4, group = 64 }\nencoder = 'refit'\n\
             [[rule]]\nmatch = '*.a'\ncodec.affine = { bits = 6, group = 64 }\n\
             [[rule]]\nmatch = '*.b'\ncodec.affine = { bits = 6, group = 64 }\nencoder = 'mlx'\n\
             [[rule]]\nmatch = '*.c'\ncodec = 'nvfp4'\n\
             [[rule]]\nmatch = '*.d'\ncodec = 'bf16'\n"]);
        let encoder = |module: &str| recipe.encoder(&recipe.rule_for(module).unwrap().1.choice);
        assert_eq!(encoder("x.a"), Some("refit"));
        assert_eq!(encoder("x.b"), Some("mlx"));
        assert_eq!(encoder("x.c"), Some("mlx"));
        assert_eq!(encoder("x.d"), None);
        assert_eq!(recipe.encoder(&recipe.default), Some("refit"));
        assert!(recipe.rule_for("x.e").is_none());
        assert_eq!(recipe.rule_for("x.c").unwrap().0, 2);
    }

    #[test]
    fn a_budget_is_joined_key_by_key_but_its_size_is_one() {
        let base = "name = 'base'\ndefault.codec = 'mxfp4'\n[budget]\nbits-per-weight = 4.5\nsensitivity = 's.json'\n\
                    candidates = ['affine-4g64', 'bf16']\ncontrol = 'stop'\ntext = 't.jsonl'\n\
                    [[rule]]\nmatch = '*.a'\nleast-bits = 4\n[[rule]]\nmatch = '*.b'\nmost-bits = 6\n";
        let child = "name = 'child'\nextends = 'x'\n[budget]\nbytes = '3GB'\nmethod = 'greedy'\n\
                     [[rule]]\nmatch = '*.b'\nleast-bits = 2\n";
        let recipe = joined(&[base, child]);
        let budget = recipe.budget.as_ref().unwrap();
        assert_eq!(budget.size, BudgetSize::Bytes(Bytes(3_000_000_000)));
        assert_eq!((budget.method, budget.control), (BudgetMethod::Greedy, Control::Stop));
        let candidates = budget.candidates.as_ref().unwrap().iter().map(CodecSpec::to_string);
        assert_eq!(candidates.collect::<Vec<_>>(), ["affine-4g64", "bf16"]);
        // Paths start at the folder of the file that states them.
        assert_eq!(recipe.sensitivity(), Some("f0/s.json".into()));
        assert_eq!(recipe.budget_text(), Some("f0/t.jsonl".into()));
        let limits: Vec<_> = recipe.limits.iter().map(|l| (l.pattern.as_str(), l.least, l.most)).collect();
        assert_eq!(limits, [("*.b", Some(2), None), ("*.a", Some(4), None)]);
        assert!(recipe.rules.is_empty());
    }

    #[test]
    fn a_budget_in_bits_is_rounded_down_to_bytes() {
        let of = BudgetWeights { all: 1001, decided: 501, rest: 90 };
        assert_eq!(BudgetSize::BitsPerWeight(4.5).bytes(of), 563);
        assert_eq!(BudgetSize::CodeBits(2.75).bytes(of), 90 + 172);
        assert_eq!(BudgetSize::Bytes(Bytes(7)).bytes(of), 7);
    }

    #[test]
    fn the_digest_follows_every_text_and_its_order() {
        let (base, child) = ("name = 'b'\ndefault.codec = 'bf16'\n", "name = 'c'\nextends = 'x'\n");
        let mut message = Vec::new();
        for text in [base, child] {
            message.extend((text.len() as u64).to_le_bytes());
            message.extend(text.as_bytes());
        }
        assert_eq!(joined(&[base, child]).digest(), Digest::of(&message));
        let comment = format!("{base}#\n");
        assert_ne!(joined(&[&comment, child]).digest(), joined(&[base, child]).digest());
    }

    #[test]
    fn a_mistake_found_later_is_shown_at_its_rule() {
        let recipe =
            joined(&["name = 'x'\ndefault.codec = 'bf16'\n[[rule]]\nmatch = '*.nope'\ncodec = 'mxfp4'\n"]);
        let help = Some("remove it".to_owned());
        let problem = recipe.problem(&recipe.rules[0].origin, "this rule matches no module".into(), help);
        assert_eq!(
            problem.to_string(),
            "f0/r.toml:4:9\n4 | match = '*.nope'\n  |         ^^^^^^^^\nthis rule matches no module"
        );
        assert_eq!(crate::failure::Failure::help(&problem).as_deref(), Some("remove it"));
        let codec = recipe.problem(&recipe.rules[0].codec_origin, String::new(), None);
        assert_eq!(codec.place(), Some((Path::new("f0/r.toml"), 5, 9)));
        let default = recipe.problem(&recipe.origins.default_codec.unwrap(), String::new(), None);
        assert_eq!(default.place(), Some((Path::new("f0/r.toml"), 2, 17)));
    }

    #[test]
    fn texts_that_are_no_chain_are_refused() {
        let (plain, child) = ("name = 'b'\ndefault.codec = 'bf16'\n", "name = 'c'\nextends = 'x'\n");
        let refuse = |texts: [&str; 2]| {
            let files = texts.map(|text| file("r.toml", text)).to_vec();
            Recipe::parse(files, PIPELINES).unwrap_err().to_string()
        };
        assert!(refuse([plain, plain]).contains("this recipe has a base but no `extends`"));
        assert!(refuse([child, child]).contains("`extends` names a recipe whose text was not given"));
    }

    #[test]
    fn a_file_of_nothing_but_mistakes_is_answered_in_a_hundred() {
        let text: String = (0..250).map(|i| format!("key{i:03} = {i}\n")).collect();
        let problems = Recipe::parse(vec![file("r.toml", &text)], PIPELINES).unwrap_err();
        assert_eq!(problems.list().len(), 101);
        // 250 unknown keys, no name, no default: 252 mistakes, the absent ones placed at the start.
        let last = problems.list()[100].to_string();
        assert!(last.starts_with("r.toml:99:1\n99 | key098"), "{last}");
        assert!(last.ends_with("and 152 more mistakes, the first of them here"), "{last}");
    }

    #[test]
    fn eight_bases_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |i: usize| folder.path().join(format!("r{i}.toml"));
        for i in 0..8 {
            std::fs::write(path(i), format!("name = 'r{i}'\nextends = 'r{}.toml'\n", i + 1)).unwrap();
        }
        std::fs::write(path(8), "name = 'r8'\ndefault.codec = 'bf16'\nseed = 5\n").unwrap();
        let recipe = Recipe::load(&path(0), PIPELINES).unwrap();
        assert_eq!((recipe.name.as_str(), recipe.seed, recipe.files.len()), ("r0", 5, 9));
        assert_eq!(recipe.files[8].path, path(0));
        // The same texts without the file system, as provenance keeps them.
        let again = Recipe::parse(recipe.files.clone(), PIPELINES).unwrap();
        assert_eq!((again.name.as_str(), again.digest()), ("r0", recipe.digest()));
    }
}
