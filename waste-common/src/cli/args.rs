//! The options every tool has.

use std::ffi::OsString;

/// The options every tool has; flatten it into the tool's own arguments. They work before and after a subcommand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct CommonArgs {
    /// Print exactly one JSON object on standard output, also on failure
    #[arg(long, global = true, help_heading = "Output")]
    pub json: bool,
    /// Say nothing on standard error but errors
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Output")]
    pub quiet: bool,
    /// Say more on standard error
    #[arg(short, long, global = true, help_heading = "Output")]
    pub verbose: bool,
}

impl CommonArgs {
    /// What `argv` (with the program name) seems to ask for, when it cannot be parsed or asks for the version.
    pub(super) fn scan(argv: &[OsString]) -> CommonArgs {
        let mut seen = CommonArgs::default();
        for arg in argv.iter().skip(1).map_while(|arg| (arg != "--").then(|| arg.to_string_lossy())) {
            let short = |letter| arg.starts_with('-') && !arg.starts_with("--") && arg.contains(letter);
            seen.json |= arg == "--json";
            seen.quiet |= arg == "--quiet" || short('q');
            seen.verbose |= arg == "--verbose" || short('v');
        }
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(line: &str) -> CommonArgs {
        CommonArgs::scan(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn scan_sees_long_and_bundled_flags_up_to_the_double_dash() {
        assert_eq!(scan("t --json -Vv"), CommonArgs { json: true, quiet: false, verbose: true });
        assert_eq!(scan("t -q"), CommonArgs { json: false, quiet: true, verbose: false });
        assert_eq!(scan("--json x -- --json -v"), CommonArgs::default());
    }
}
