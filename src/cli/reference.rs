//! The command reference, from the parser's own words (`docs/cli.md`).

use clap::CommandFactory as _;

/// Every command's help, as Markdown.
pub fn reference() -> String {
    let mut text = String::new();
    section(&mut super::Cli::command(), "", &mut text);
    text
}

fn section(command: &mut clap::Command, above: &str, text: &mut String) {
    let name = if above.is_empty() {
        command.get_name().to_owned()
    } else {
        format!("{above} {}", command.get_name())
    };
    let bin: &'static str = name.clone().leak();
    let mut shown = command.clone().bin_name(bin).term_width(118);
    let help = shown.render_help().to_string();
    let help: Vec<&str> = help.lines().map(str::trim_end).collect();
    text.push_str(&format!("### `{name}`\n\n```text\n{}\n```\n\n", help.join("\n").trim_end()));
    let mut below: Vec<clap::Command> =
        command.get_subcommands().filter(|sub| sub.get_name() != "help").cloned().collect();
    for sub in &mut below {
        section(sub, &name, text);
    }
}
