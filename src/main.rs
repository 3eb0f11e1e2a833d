//! The `tqc` command.

fn main() -> std::process::ExitCode {
    tqc::cli::main()
}
