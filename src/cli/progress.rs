//! Progress bars on a terminal, silence elsewhere.

use std::io::IsTerminal as _;
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

use crate::build::Progress;

/// Draws how far a build is: bytes, modules, rate, time left.
#[derive(Default)]
pub struct Bar {
    bar: Mutex<Option<ProgressBar>>,
    modules: Mutex<(u64, u64)>,
}

/// The bar's look; `bytes` decides the units.
const STYLE: &str =
    "{msg:>22} [{bar:30}] {bytes}/{total_bytes} of source  {prefix}  {bytes_per_sec}  {eta} left";

impl Bar {
    fn with(&self, act: impl FnOnce(&ProgressBar)) {
        if let Some(bar) = self.bar.lock().expect("drawing does not panic").as_ref() {
            act(bar);
        }
    }
}

/// A bar of bytes on a terminal.
pub fn bytes_bar(total: u64) -> Option<ProgressBar> {
    if !std::io::stderr().is_terminal() {
        return None;
    }
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template(STYLE).expect("the template is a constant");
    bar.set_style(style.progress_chars("=> "));
    Some(bar)
}

impl Progress for Bar {
    fn begin(&self, bytes: u64, modules: u64, bytes_done: u64, modules_done: u64) {
        let Some(bar) = bytes_bar(bytes) else { return };
        bar.set_position(bytes_done);
        // Finished work must not count into the rate.
        bar.reset_eta();
        bar.set_message("encoding");
        bar.set_prefix(format!("{modules_done}/{modules} modules"));
        *self.modules.lock().expect("counting does not panic") = (modules_done, modules);
        *self.bar.lock().expect("drawing does not panic") = Some(bar);
    }

    fn panel(&self, bytes: u64) {
        self.with(|bar| bar.inc(bytes));
    }

    fn module(&self, _name: &str) {
        let mut modules = self.modules.lock().expect("counting does not panic");
        modules.0 += 1;
        let (done, all) = *modules;
        self.with(|bar| bar.set_prefix(format!("{done}/{all} modules")));
    }

    fn phase(&self, what: &str) {
        self.with(|bar| bar.set_message(what.to_owned()));
    }

    fn end(&self) {
        if let Some(bar) = self.bar.lock().expect("drawing does not panic").take() {
            bar.finish_and_clear();
        }
    }
}
