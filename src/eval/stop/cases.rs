//! Prompts, and the answers that models are read along.

use std::path::Path;

use serde::Serialize;

use super::{Along, Row, Speaking, Written};
use crate::digest::{Digest, canonical_json};
use crate::eval::EvalError;
use crate::eval::dump::{Said, Speaker};
use crate::eval::tasks::prompt::chat;
use crate::eval::tasks::suite::{Items, Suite};
use crate::failure::Outcome;
use crate::generate::Finish;
use crate::text::{ChatTemplate, Conversation, TextError, Tokenizer};

/// A prompt as tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Prompt {
    /// Where it is from: a suite's name, or `built-in`.
    pub suite: String,
    /// `raw` or `chat`.
    pub frame: &'static str,
    /// Its name there.
    pub id: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
}

/// A prompt and a reference answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Tokens before the answer.
    pub prompt: Vec<u32>,
    /// Tokens of the answer.
    pub answer: Vec<u32>,
    /// Whether an end token follows the answer.
    pub by_end_token: bool,
    /// Whether the answer ended by itself: by an end token or a blank line.
    pub ended: bool,
    /// The answer is nothing but white space.
    pub empty: bool,
    /// The answer ends in a repetition.
    pub loops: bool,
}

impl Case {
    /// What `written` is after `prompt`.
    pub fn of(prompt: &[u32], written: &Written) -> Self {
        let by_end_token = written.finish == Finish::EndToken;
        Self {
            prompt: prompt.to_vec(),
            answer: written.tokens.clone(),
            by_end_token,
            ended: by_end_token || written.finish == Finish::StopString,
            empty: written.empty,
            loops: written.loop_period.is_some(),
        }
    }
}

/// One prompt a line.
const BUILT_IN: &str = include_str!("prompts.txt");

/// The digest of some prompts.
pub fn digest(prompts: &[Prompt]) -> Digest {
    Digest::of(&canonical_json(prompts))
}

/// The built-in prompts, or those of `suites`: raw, and through the chat template of `dir` if it has one.
///
/// # Errors
/// Those of tokenizer and template; [`EvalError::NoPrompts`] if a suite has none.
pub fn prompts(dir: &Path, tokenizer: &Tokenizer, suites: &[Suite]) -> Outcome<Vec<Prompt>> {
    let template = match ChatTemplate::open(dir) {
        Ok(template) => Some(template),
        Err(TextError::NoTemplate { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    // Suite, id, raw prompt, question.
    let mut texts: Vec<(String, String, Option<String>, Option<String>)> = Vec::new();
    if suites.is_empty() {
        for (i, question) in BUILT_IN.lines().enumerate() {
            let raw = format!("Question: {question}\nAnswer:");
            texts.push(("built-in".to_owned(), i.to_string(), Some(raw), Some(question.to_owned())));
        }
    }
    for suite in suites {
        let Items::Generative(items) = &suite.items else {
            return Err(EvalError::NoPrompts { suite: suite.name.clone() }.into());
        };
        for item in items {
            texts.push((suite.name.clone(), item.id.clone(), item.raw_prompt.clone(), item.question.clone()));
        }
    }
    let mut prompts = Vec::new();
    for frame in ["raw", "chat"] {
        for (suite, id, raw, question) in &texts {
            let tokens = match (frame, raw, question, &template) {
                ("raw", Some(raw), _, _) => tokenizer.encode(raw, true)?,
                ("chat", _, Some(question), Some(template)) => chat(tokenizer, template, question, false)?,
                _ => continue,
            };
            prompts.push(Prompt { suite: suite.clone(), frame, id: id.clone(), tokens });
        }
    }
    Ok(prompts)
}

/// The answers in the text of the speaker's dump: each begins after what the chat template puts before an answer, and ends before an
/// end token. With the teacher along each.
///
/// # Errors
/// [`EvalError::NoAnswers`] if there are none; those of the template.
pub fn of_dump(
    speaker: &Speaker<'_>,
    dir: &Path,
    speaking: &Speaking<'_>,
    most: usize,
) -> Outcome<Vec<(Prompt, Case, Along)>> {
    let dump = speaker.dump;
    let opening = opening(dir, speaking.tokenizer)?;
    let isa = speaking.model.cpu().isa;
    let (mut found, mut start) = (Vec::new(), 0);
    for (number, sequence) in dump.sequences.iter().enumerate() {
        let tokens = &sequence.tokens;
        for at in opening.len()..tokens.len() {
            if !tokens[..at].ends_with(&opening) || found.len() == most {
                continue;
            }
            let Some(len) = tokens[at..].iter().position(|id| speaking.ends.contains(id)) else { continue };
            let answer = tokens[at..at + len].to_vec();
            let Said::Logits(logits) = speaker.say(start + at - 1..start + at + len) else {
                return Err(EvalError::NoHeadInDump.into());
            };
            let rows: Option<Vec<Row>> = logits
                .chunks_exact(dump.record.teacher.vocab)
                .map(|row| Row::of(row, speaking.ends, isa))
                .collect();
            let rows = rows.ok_or(EvalError::TeacherNonFinite { position: start + at })?;
            let text = speaking.tokenizer.decode(&answer, true)?;
            let case = Case {
                prompt: tokens[..at].to_vec(),
                loops: crate::eval::tasks::generative::loop_period(&answer).is_some(),
                answer,
                by_end_token: true,
                ended: true,
                empty: text.trim().is_empty(),
            };
            let id = format!("{number}.{at}");
            let prompt = Prompt { suite: "dump".to_owned(), frame: "chat", id, tokens: case.prompt.clone() };
            found.push((prompt, case, Along::of(&rows, true)));
        }
        start += tokens.len();
    }
    match found.is_empty() {
        true => Err(EvalError::NoAnswers.into()),
        false => Ok(found),
    }
}

/// The tokens that the chat template puts between a user's message and the answer.
fn opening(dir: &Path, tokenizer: &Tokenizer) -> Outcome<Vec<u32>> {
    let template = ChatTemplate::open(dir)?;
    let mut conversation = Conversation::new(vec![Conversation::message("user", "x")]);
    let with = template.render(&conversation)?;
    conversation.add_generation_prompt = false;
    let without = template.render(&conversation)?;
    Ok(tokenizer.encode(with.strip_prefix(&without).unwrap_or_default(), false)?)
}
