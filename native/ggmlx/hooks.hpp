#pragma once

namespace dflash {

/// Routes ggml's log lines into base/log and writes the message of a ggml abort there before the process ends.
/// Done once; any thread.
void install_hooks();

} // namespace dflash
