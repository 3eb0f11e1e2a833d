//! What goes into the linear layers of one decoder layer, as sums over tokens; and what a file says of their outputs.
//!
//! H = Σ_t x_t x_tᵀ over the tokens of a text, and Σ_t |x_t| channel by channel. Layers that read the same values share
//! one sum; each expert has its own. Rows come in the parts that [`crate::runtime::Stream`] cuts, which depend on the
//! lengths of the sequences alone: so the sums do not depend on threads, memory or instruction set.

use std::collections::BTreeMap;

use super::CalibError;
use crate::backend::cpu::Cpu;
use crate::linalg::Symmetric;
use crate::runtime::Observer;

/// The inputs of one set of linear layers.
#[derive(Debug)]
pub struct Input {
    /// Σ x xᵀ.
    pub hessian: Symmetric,
    /// Σ |x|, [K].
    pub magnitude: Vec<f64>,
    /// Tokens summed over.
    pub tokens: u64,
}

impl Input {
    /// Of K channels, nothing seen.
    pub fn new(channels: usize) -> Self {
        Self { hessian: Symmetric::new(channels), magnitude: vec![0.0; channels], tokens: 0 }
    }

    pub(super) fn add(&mut self, rows: &[f32], cpu: &Cpu) {
        self.hessian.add_products(rows, cpu.isa, &|count, part| cpu.threads.run(count, part));
        for row in rows.chunks_exact(self.magnitude.len()) {
            self.magnitude.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(x.abs()));
        }
        self.tokens += (rows.len() / self.magnitude.len()) as u64;
    }
}

/// Which sum a module's inputs are in: the first module that reads them, and the expert.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct InputKey {
    /// Path of a module.
    pub module: String,
    /// Number of an expert.
    pub expert: Option<usize>,
}

/// Sums the inputs of the modules that are wanted.
pub struct Collector<'a> {
    cpu: &'a Cpu,
    /// Paths, and K of each.
    wanted: &'a BTreeMap<String, usize>,
    inputs: BTreeMap<InputKey, Input>,
    /// The module whose inputs a module shares.
    shared: BTreeMap<String, String>,
    bad: Option<String>,
}

impl<'a> Collector<'a> {
    /// For modules of these paths, with K of each.
    pub fn new(cpu: &'a Cpu, wanted: &'a BTreeMap<String, usize>) -> Self {
        Self { cpu, wanted, inputs: BTreeMap::new(), shared: BTreeMap::new(), bad: None }
    }

    /// Adds rows that several modules read.
    fn see(&mut self, modules: &[(String, Option<usize>)], rows: &[f32]) {
        let wanted: Vec<(&String, usize)> =
            modules.iter().filter_map(|(module, _)| Some((module, *self.wanted.get(module)?))).collect();
        let Some((first, channels)) = wanted.first().copied() else { return };
        if self.bad.is_none() && !rows.iter().all(|x| x.is_finite()) {
            self.bad = Some(first.clone());
        }
        for (module, _) in &wanted {
            self.shared.entry((*module).clone()).or_insert_with(|| first.clone());
        }
        let key = InputKey { module: first.clone(), expert: modules[0].1 };
        self.inputs.entry(key).or_insert_with(|| Input::new(channels)).add(rows, self.cpu);
    }

    /// Everything seen.
    ///
    /// # Errors
    /// [`CalibError::NonFinite`] if an input was not finite.
    pub fn finish(self) -> Result<Inputs, CalibError> {
        // Finite inputs can have infinite squares.
        let infinite = || self.inputs.iter().find(|(_, input)| !input.hessian.is_finite());
        match self.bad.clone().or_else(|| infinite().map(|(key, _)| key.module.clone())) {
            Some(module) => Err(CalibError::NonFinite { module }),
            None => Ok(Inputs { inputs: self.inputs, shared: self.shared, outputs: BTreeMap::new() }),
        }
    }
}

/// Sums of a layer's inputs.
#[derive(Debug, Default)]
pub struct Inputs {
    inputs: BTreeMap<InputKey, Input>,
    shared: BTreeMap<String, String>,
    outputs: BTreeMap<InputKey, Symmetric>,
}

impl Inputs {
    /// One input of one module.
    pub fn of(module: &str, input: Input) -> Self {
        let mut inputs = Self::default();
        inputs.insert(InputKey { module: module.to_owned(), expert: None }, input);
        inputs
    }

    /// Adds what goes into a module alone; whether there was nothing before.
    pub(super) fn insert(&mut self, key: InputKey, input: Input) -> bool {
        self.shared.insert(key.module.clone(), key.module.clone());
        self.inputs.insert(key, input).is_none()
    }

    /// What goes into a module, or into one of its experts; none if no token did.
    pub fn get(&self, module: &str, expert: Option<usize>) -> Option<&Input> {
        let module = self.shared.get(module)?.clone();
        self.inputs.get(&InputKey { module, expert })
    }

    /// Adds what errors in the outputs of a module, or of one of its experts, cost.
    ///
    /// Whether there were none before.
    pub(super) fn insert_outputs(&mut self, key: InputKey, outputs: Symmetric) -> bool {
        self.outputs.insert(key, outputs).is_none()
    }

    /// What errors in the outputs of a module cost together, or of one of its experts; none if no file says.
    pub fn outputs(&self, module: &str, expert: Option<usize>) -> Option<&Symmetric> {
        self.outputs.get(&InputKey { module: module.to_owned(), expert })
    }

    /// What goes into all experts of a module together.
    pub fn all_experts(&self, module: &str) -> Option<Input> {
        let module = self.shared.get(module)?;
        let experts = self.inputs.iter().filter(|(key, _)| key.module == *module).map(|(_, input)| input);
        let mut sums: Option<(Vec<f32>, Vec<f64>, u64)> = None;
        for input in experts {
            let Some((hessian, magnitude, tokens)) = &mut sums else {
                sums = Some((input.hessian.values().to_vec(), input.magnitude.clone(), input.tokens));
                continue;
            };
            hessian.iter_mut().zip(input.hessian.values()).for_each(|(sum, x)| *sum += x);
            magnitude.iter_mut().zip(&input.magnitude).for_each(|(sum, x)| *sum += x);
            *tokens += input.tokens;
        }
        let (hessian, magnitude, tokens) = sums?;
        let hessian = Symmetric::from_values(hessian, magnitude.len())?;
        Some(Input { hessian, magnitude, tokens })
    }

    /// Whether nothing was summed.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }

    /// Every sum, with the modules that share it.
    pub fn iter(&self) -> impl Iterator<Item = (&InputKey, &Input, Vec<&str>)> {
        self.inputs.iter().map(|(key, input)| {
            let readers = self.shared.iter().filter(|(_, first)| **first == key.module);
            (key, input, readers.map(|(module, _)| module.as_str()).collect())
        })
    }
}

/// `mlp.switch_mlp.3.gate_proj` is the third expert of `mlp.switch_mlp.gate_proj`.
fn split_expert(module: &str) -> (String, Option<usize>) {
    let parts: Vec<&str> = module.split('.').collect();
    let number = parts.iter().position(|part| part.bytes().all(|b| b.is_ascii_digit()) && !part.is_empty());
    match number {
        Some(at) => {
            let rest: Vec<&str> =
                parts.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, p)| *p).collect();
            (rest.join("."), parts[at].parse().ok())
        }
        None => (module.to_owned(), None),
    }
}

impl Observer for Collector<'_> {
    fn linear_input(&mut self, layer: &str, modules: &[&str], rows: &[f32]) {
        let named = modules.iter().map(|module| {
            let (module, expert) = split_expert(module);
            (format!("{layer}.{module}"), expert)
        });
        self.see(&named.collect::<Vec<_>>(), rows);
    }
}
