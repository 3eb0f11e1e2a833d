//! One recipe file, read but not yet joined with its bases.

use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::de::DeValue;

use super::budget::{self, BudgetSheet, Limit};
use super::calibration::CalibrationSheet;
use super::dom::{At, Report, Table, Value, parse};
use super::error::{CODECS, Mistake};
use super::keys::Section;
use super::pattern::Pattern;
use super::text::{Origin, RecipeFile};
use super::transform::TransformSheet;
use super::{Choice, KeepPattern, Rule, Source, encoder_fills};
use crate::codec::trellis::{Along, Code, DEFAULT_CODE, DEFAULT_STATES, Scales, Trellis};
use crate::codec::{AffineBits, CodecSpec, GroupSize};
use crate::quant::ENCODERS;
use crate::tensor::Layout;
use crate::units::Bytes;

/// The least `shard-size`: below it, headers outweigh the weights.
const LEAST_SHARD: Bytes = Bytes(1_000_000);

/// What one file states. A value that is given but wrong is a problem in the report and `None` here.
#[derive(Debug, Default)]
pub(super) struct Sheet {
    pub name: Option<String>,
    pub description: Option<String>,
    pub base_model: Option<String>,
    pub extends: Option<At<PathBuf>>,
    pub pipeline: Option<At<String>>,
    pub seed: Option<u64>,
    pub source: Option<At<Source>>,
    /// The header of `[default]`.
    pub default_at: Option<Origin>,
    pub states_codec: bool,
    pub codec: Option<At<CodecSpec>>,
    pub encoder: Option<At<String>>,
    pub rules: Vec<Rule>,
    pub limits: Vec<Limit>,
    pub budget: BudgetSheet,
    pub keep: Vec<KeepPattern>,
    pub transform: TransformSheet,
    pub calibration: CalibrationSheet,
    pub directory: Option<At<PathBuf>>,
    pub shard_size: Option<Bytes>,
    pub layout: Option<At<Layout>>,
}

/// The base that a file names, whatever else is wrong with it.
pub(super) fn base_of(text: &str) -> Option<(PathBuf, Range<usize>)> {
    let document = parse(text, &mut Report { file: 0, problems: Vec::new() })?;
    let value = document.get("extends")?;
    let DeValue::String(path) = value.get_ref() else { return None };
    (!path.trim().is_empty()).then(|| (PathBuf::from(path.as_ref()), value.span()))
}

impl Sheet {
    /// Reads one file; everything wrong with it goes to `report`.
    pub fn read(file: &RecipeFile, pipelines: &[&str], report: &mut Report) -> Self {
        let mut sheet = Self::default();
        let Some(document) = parse(&file.text, report) else {
            // Nothing is known of the rest, so nothing is reported as absent either.
            sheet.states_codec = true;
            return sheet;
        };
        let start = report.origin(0..0);
        let top = Table::new(Section::Top, &document, start, report);
        sheet.name = top.require("name", report).and_then(|value| name(value, report));
        sheet.base_model =
            top.get("base-model").and_then(|value| value.string(report)).map(|text| text.value.to_owned());
        sheet.description =
            top.get("description").and_then(|value| value.string(report)).map(|text| text.value.to_owned());
        sheet.extends = top.get("extends").and_then(|value| path(value, report));
        sheet.pipeline = top.get("pipeline").and_then(|value| pipeline(value, pipelines, report));
        sheet.seed = top.get("seed").and_then(|value| seed(value, report));
        sheet.source = top.get("source").and_then(|value| source(value, report));
        if let Some(value) = top.get("default") {
            sheet.default_at = Some(value.at);
            // A `[default]` of the wrong type is one mistake, not also a missing codec.
            sheet.states_codec = !matches!(value.value, DeValue::Table(_));
            if let Some(table) = value.table(Section::Default, report) {
                sheet.states_codec = table.get("codec").is_some();
                sheet.codec = table.get("codec").and_then(|value| codec(value, report));
                sheet.encoder = table.get("encoder").and_then(|value| encoder(value, report));
            }
        }
        if let Some(value) = top.get("rule") {
            (sheet.rules, sheet.limits) = rules(value, &file.text, report);
        }
        if let Some(table) = top.get("keep").and_then(|value| value.table(Section::Keep, report)) {
            sheet.keep = keep(&table, &file.text, report);
        }
        if let Some(value) = top.get("transform") {
            sheet.transform = TransformSheet::read(value, report);
        }
        if let Some(value) = top.get("calibration") {
            sheet.calibration.read(value, report);
        }
        if let Some(value) = top.get("gptq") {
            sheet.calibration.read_gptq(value, report);
        }
        if let Some(value) = top.get("budget") {
            sheet.budget = BudgetSheet::read(value, report);
        }
        if let Some(table) = top.get("output").and_then(|value| value.table(Section::Output, report)) {
            sheet.directory = table.get("directory").and_then(|value| path(value, report));
            sheet.shard_size = table.get("shard-size").and_then(|value| shard_size(value, report));
            sheet.layout = table.get("layout").and_then(|value| layout(value, report));
        }
        sheet
    }
}

fn name(value: Value<'_>, report: &mut Report) -> Option<String> {
    let At { value: found, at } = value.string(report)?;
    let good = found.len() <= 100
        && found.starts_with(|c: char| c.is_ascii_alphanumeric())
        && found.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if good {
        return Some(found.to_owned());
    }
    report.add(at, Mistake::BadName { found: found.chars().take(120).collect() });
    None
}

pub(super) fn path(value: Value<'_>, report: &mut Report) -> Option<At<PathBuf>> {
    value.string(report).map(|text| At { value: PathBuf::from(text.value), at: text.at })
}

fn pipeline(value: Value<'_>, known: &[&str], report: &mut Report) -> Option<At<String>> {
    let At { value: found, at } = value.string(report)?;
    if known.contains(&found) {
        return Some(At { value: found.to_owned(), at });
    }
    let known = known.iter().map(|&name| name.to_owned()).collect();
    report.add(at, Mistake::UnknownPipeline { found: found.to_owned(), known });
    None
}

pub(super) fn seed(value: Value<'_>, report: &mut Report) -> Option<u64> {
    let (number, found) = value.integer(report)?;
    // TOML promises 64-bit signed integers and no more.
    let seed = number.and_then(|n| i64::try_from(n).ok()).and_then(|n| u64::try_from(n).ok());
    if seed.is_none() {
        report.add(value.at, Mistake::SeedRange { found });
    }
    seed
}

fn source(value: Value<'_>, report: &mut Report) -> Option<At<Source>> {
    let table = value.table(Section::Source, report)?;
    let hub = table.get("hub");
    let revision = table.get("revision");
    match (table.get("path"), hub) {
        (Some(_), Some(hub)) => {
            report.add(hub.at, Mistake::TwoSources);
            None
        }
        (None, None) => {
            report.add(table.at, Mistake::NoSource);
            None
        }
        (Some(written), None) => {
            if let Some(revision) = revision {
                report.add(revision.at, Mistake::RevisionWithoutHub);
            }
            let At { value, at } = path(written, report)?;
            Some(At { value: Source::Path(value), at })
        }
        (None, Some(hub)) => {
            let repo = repository(hub, report);
            let revision = table.require("revision", report).and_then(|value| commit(value, report));
            Some(At { value: Source::Hub { repo: repo?, revision: revision? }, at: hub.at })
        }
    }
}

fn repository(value: Value<'_>, report: &mut Report) -> Option<String> {
    let At { value: found, at } = value.string(report)?;
    let word = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    if found.len() <= 200 && found.split_once('/').is_some_and(|(org, name)| word(org) && word(name)) {
        return Some(found.to_owned());
    }
    report.add(at, Mistake::BadHub { found: found.to_owned() });
    None
}

fn commit(value: Value<'_>, report: &mut Report) -> Option<String> {
    let At { value: found, at } = value.string(report)?;
    if found.len() == 40 && found.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Some(found.to_ascii_lowercase());
    }
    report.add(at, Mistake::Unpinned { found: found.to_owned() });
    None
}

fn codec(value: Value<'_>, report: &mut Report) -> Option<At<CodecSpec>> {
    let known = |found: &str| CODECS.iter().copied().find(|codec| *codec == found);
    let spec = match value.value {
        DeValue::String(found) => match known(found) {
            Some(codec @ ("affine" | "trellis")) => {
                report.add(value.at, Mistake::CodecNeedsParameters { codec });
                None
            }
            // `affine-4g64` is how tables print it, so it is what people copy.
            None if found.starts_with("affine") => {
                report.add(value.at, Mistake::CodecNeedsParameters { codec: "affine" });
                None
            }
            None if found.starts_with("trellis") => {
                report.add(value.at, Mistake::CodecNeedsParameters { codec: "trellis" });
                None
            }
            Some(name) => {
                let name: serde::de::value::StrDeserializer<'_, serde::de::value::Error> =
                    name.into_deserializer();
                Some(CodecSpec::deserialize(name).expect("every other name in CODECS stands alone"))
            }
            None => {
                report.add(value.at, Mistake::UnknownCodec { found: found.to_string() });
                None
            }
        },
        DeValue::Table(entries) => {
            let mut unknown = 0;
            for name in entries.keys().filter(|name| known(name.get_ref()).is_none()) {
                unknown += 1;
                let at = report.origin(name.span());
                report.add(at, Mistake::UnknownCodec { found: name.get_ref().to_string() });
            }
            match entries.iter().next() {
                _ if unknown > 0 => None,
                Some((name, parameters)) if entries.len() == 1 => {
                    let codec = known(name.get_ref())?;
                    let span = if parameters.span().is_empty() { name.span() } else { parameters.span() };
                    let at = report.origin(span);
                    let parameters = Value { key: codec, value: parameters.get_ref(), at, element: false };
                    match codec {
                        "affine" => affine(parameters, report),
                        "trellis" => trellis(parameters, report),
                        _ => {
                            report.add(at, Mistake::CodecTakesNoParameters { codec });
                            None
                        }
                    }
                }
                _ => {
                    report.add(value.at, Mistake::CodecCount { found: entries.len() });
                    None
                }
            }
        }
        _ => {
            value.wrong_type("a codec's name or a table of its parameters", report);
            None
        }
    };
    spec.map(|spec| At { value: spec, at: value.at })
}

fn affine(value: Value<'_>, report: &mut Report) -> Option<CodecSpec> {
    let table = value.table(Section::Affine, report)?;
    let bits: Option<AffineBits> = table.require("bits", report).and_then(|value| parameter(value, report));
    let group: Option<GroupSize> = table.require("group", report).and_then(|value| parameter(value, report));
    Some(CodecSpec::Affine { bits: bits?, group: group? })
}

fn trellis(value: Value<'_>, report: &mut Report) -> Option<CodecSpec> {
    const ALONG: [(&str, Along); 2] = [("outputs", Along::Outputs), ("inputs", Along::Inputs)];
    const SCALES: [(&str, Scales); 2] = [("both", Scales::Both), ("one", Scales::One)];
    let at = value.at;
    let table = value.table(Section::Trellis, report)?;
    // A number that is too large for its type is out of every range.
    let whole = |value: Value<'_>, report: &mut Report| {
        value
            .integer(report)
            .map(|(number, _)| number.and_then(|n| u32::try_from(n).ok()).unwrap_or(u32::MAX))
    };
    let bits = table.require("bits", report).and_then(|value| whole(value, report));
    let states = match table.get("states") {
        Some(value) => whole(value, report),
        None => Some(DEFAULT_STATES),
    };
    let word = |key: &'static str, known: Vec<&'static str>| {
        move |found: String| Mistake::UnknownWord { key, found, known }
    };
    let code = match table.get("code") {
        Some(value) => {
            let names = Code::ALL.map(|code| (code.name(), code));
            let mistake = word("code", names.map(|(name, _)| name).to_vec());
            value.named(&names, report, mistake).map(|code| code.value)
        }
        None => Some(DEFAULT_CODE),
    };
    let along = match table.get("along") {
        Some(value) => {
            value.named(&ALONG, report, word("along", vec!["outputs", "inputs"])).map(|along| along.value)
        }
        None => Some(Along::default()),
    };
    let scales = match table.get("scales") {
        Some(value) => value.named(&SCALES, report, word("scales", vec!["both", "one"])).map(|s| s.value),
        None => Some(Scales::default()),
    };
    match Trellis::new(bits?, states?, code?, along?, scales?) {
        Ok(trellis) => Some(CodecSpec::Trellis(trellis)),
        Err(error) => {
            report.add(at, Mistake::Parameter { message: error.to_string() });
            None
        }
    }
}

/// A number whose type checks it.
fn parameter<T: TryFrom<u32, Error = String>>(value: Value<'_>, report: &mut Report) -> Option<T> {
    let (number, found) = value.integer(report)?;
    let checked = match number.map(u32::try_from) {
        Some(Ok(number)) => T::try_from(number),
        // No parameter is 0, so the type's own message says what it needs.
        _ => T::try_from(0).map_err(|message| match message.strip_suffix('0') {
            Some(needed) => format!("{needed}{found}"),
            None => message,
        }),
    };
    match checked {
        Ok(parameter) => Some(parameter),
        Err(message) => {
            report.add(value.at, Mistake::Parameter { message });
            None
        }
    }
}

fn encoder(value: Value<'_>, report: &mut Report) -> Option<At<String>> {
    let At { value: found, at } = value.string(report)?;
    if ENCODERS.contains(&found) {
        return Some(At { value: found.to_owned(), at });
    }
    report.add(at, Mistake::UnknownEncoder { found: found.to_owned() });
    None
}

/// Reports an encoder that cannot fill the codec beside it.
pub(super) fn check_encoder(codec: CodecSpec, encoder: &At<String>, report: &mut Report) {
    if !encoder_fills(&encoder.value, codec) {
        report.add(encoder.at, Mistake::EncoderRefuses { encoder: encoder.value.clone(), codec });
    }
}

fn pattern(value: Value<'_>, report: &mut Report) -> Option<At<Pattern>> {
    let At { value: text, at } = value.string(report)?;
    match Pattern::new(text) {
        Ok(pattern) => Some(At { value: pattern, at }),
        Err(error) => {
            report.add(at, error.into());
            None
        }
    }
}

fn line_of(text: &str, at: Origin) -> usize {
    text[..at.start].matches('\n').count() + 1
}

fn rules(value: Value<'_>, text: &str, report: &mut Report) -> (Vec<Rule>, Vec<Limit>) {
    let mut rules: Vec<Rule> = Vec::new();
    let mut limits: Vec<Limit> = Vec::new();
    for element in value.elements("an array of tables", report) {
        let Some(table) = element.table(Section::Rule, report) else { continue };
        let pattern = table.require("match", report).and_then(|value| pattern(value, report));
        if ["least-bits", "most-bits"].into_iter().any(|key| table.get(key).is_some()) {
            if let Some(limit) = limit(&table, pattern, report) {
                match limits.iter().find(|earlier| earlier.pattern == limit.pattern) {
                    Some(same) => {
                        let earlier = line_of(text, same.origin);
                        let pattern = limit.pattern.as_str().to_owned();
                        report.add(limit.origin, Mistake::Repeated { pattern, earlier });
                    }
                    None => limits.push(limit),
                }
            }
            continue;
        }
        let codec = table.require("codec", report).and_then(|value| codec(value, report));
        let encoder = table.get("encoder").and_then(|value| encoder(value, report));
        if let (Some(codec), Some(encoder)) = (&codec, &encoder) {
            check_encoder(codec.value, encoder, report);
        }
        let (Some(At { value: pattern, at }), Some(codec)) = (pattern, codec) else { continue };
        let choice = Choice { codec: codec.value, encoder: encoder.map(|encoder| encoder.value) };
        let name = || pattern.as_str().to_owned();
        if let Some(same) = rules.iter().find(|rule| rule.pattern == pattern) {
            let earlier = line_of(text, same.origin);
            let mistake = if same.choice == choice {
                Mistake::Repeated { pattern: name(), earlier }
            } else {
                let (first, second) = (same.choice.to_string(), choice.to_string());
                Mistake::Contradiction { pattern: name(), earlier, first, second }
            };
            report.add(at, mistake);
            continue;
        }
        if let Some(all) = rules.iter().find(|rule| rule.hides(&pattern)) {
            let earlier = line_of(text, all.origin);
            report.add(at, Mistake::Unreachable { pattern: name(), earlier });
        }
        rules.push(Rule { pattern, choice, origin: at, codec_origin: codec.at });
    }
    (rules, limits)
}

/// A rule that bounds what the budget gives.
fn limit(table: &Table<'_>, pattern: Option<At<Pattern>>, report: &mut Report) -> Option<Limit> {
    for key in ["codec", "encoder"] {
        if let Some(value) = table.get(key) {
            report.add(value.at, Mistake::LimitTakesNo { key });
        }
    }
    let least = table.get("least-bits").map(|value| budget::bits(value, report));
    let most = table.get("most-bits").map(|value| budget::bits(value, report));
    // A bound that is wrong is said, and must not count as absent.
    let (least, most) =
        (least.map_or(Some(None), |l| l.map(Some))?, most.map_or(Some(None), |m| m.map(Some))?);
    if let (Some(least), Some(most)) = (&least, &most)
        && least.value > most.value
    {
        report.add(most.at, Mistake::LimitsCross { least: least.value, most: most.value });
    }
    let At { value: pattern, at } = pattern?;
    let bits = |limit: Option<At<u32>>| limit.map(|limit| limit.value);
    Some(Limit { pattern, least: bits(least), most: bits(most), origin: at })
}

fn keep(table: &Table<'_>, text: &str, report: &mut Report) -> Vec<KeepPattern> {
    let Some(tensors) = table.get("tensors") else { return Vec::new() };
    let mut kept: Vec<KeepPattern> = Vec::new();
    for element in tensors.elements("an array of strings", report) {
        let Some(At { value: pattern, at }) = pattern(element, report) else { continue };
        match kept.iter().find(|keep| keep.pattern == pattern) {
            Some(same) => {
                let earlier = line_of(text, same.origin);
                report.add(at, Mistake::Repeated { pattern: pattern.as_str().to_owned(), earlier });
            }
            None => kept.push(KeepPattern { pattern, origin: at }),
        }
    }
    kept
}

fn layout(value: Value<'_>, report: &mut Report) -> Option<At<Layout>> {
    value.named(&Layout::NAMES, report, |found| Mistake::UnknownLayout { found })
}

fn shard_size(value: Value<'_>, report: &mut Report) -> Option<Bytes> {
    let At { value: text, at } = value.string(report)?;
    match Bytes::from_str(text) {
        Ok(size) if size >= LEAST_SHARD => Some(size),
        Ok(found) => {
            report.add(at, Mistake::ShardTooSmall { found, least: LEAST_SHARD });
            None
        }
        Err(error) => {
            report.add(at, error.into());
            None
        }
    }
}
