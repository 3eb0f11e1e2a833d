//! Chat templates against `goldens/templates`, which Jinja2 rendered.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use tqc::text::{ChatTemplate, Conversation, Json, Moment, TextError};

#[derive(Deserialize)]
struct File {
    templates: BTreeMap<String, String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    special: BTreeMap<String, String>,
    messages: Vec<Json>,
    tools: Vec<Json>,
    variables: BTreeMap<String, Json>,
    add_generation_prompt: bool,
    now: u64,
    expected: Option<String>,
    raises: Option<String>,
    fails: Option<String>,
}

fn render(case: &Case, source: &str) -> Result<String, TextError> {
    let template = ChatTemplate::new(Path::new("golden.jinja"), source, case.special.clone())?;
    let mut conversation = Conversation::new(case.messages.clone());
    conversation.tools = case.tools.clone();
    conversation.add_generation_prompt = case.add_generation_prompt;
    conversation.now = Moment::since_epoch(Duration::from_secs(case.now));
    for (name, value) in &case.variables {
        conversation.set(name, value.clone())?;
    }
    template.render(&conversation)
}

fn check(path: &str, at_least: usize) {
    let text = std::fs::read_to_string(path).unwrap();
    let file: File = serde_json::from_str(&text).unwrap();
    assert!(file.cases.len() >= at_least);
    let mut wrong = Vec::new();
    for case in &file.cases {
        let found = render(case, &file.templates[&case.template]);
        let right = match (&found, &case.expected, &case.raises, &case.fails) {
            (Ok(found), Some(expected), None, None) => found == expected,
            (Err(TextError::TemplateRaised { message }), None, Some(raises), None) => message == raises,
            (Err(TextError::TemplateRaised { .. }), ..) => false,
            (Err(_), None, None, Some(_)) => true,
            _ => false,
        };
        if !right {
            wrong.push(format!(
                "{}\n  found {found:?}\n  needed {:?}",
                case.name,
                case.expected.as_ref().or(case.raises.as_ref()).or(case.fails.as_ref())
            ));
        }
    }
    assert!(wrong.is_empty(), "{} of {}\n{}", wrong.len(), file.cases.len(), wrong.join("\n"));
}

#[test]
fn every_construct_renders_as_in_jinja2() {
    check("goldens/templates/constructs.json", 80);
}

#[test]
fn the_templates_of_model_families_render_as_in_jinja2() {
    check("goldens/templates/families.json", 30);
}
