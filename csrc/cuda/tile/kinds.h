// What changes the registers or the loop of a mainloop, and so is compiled apart.
#pragma once

namespace flash::cuda {

enum class ScoreKind { kPlain, kModified };  // plain: the scaled product, nothing else
enum class DropoutKind { kOff, kOn };

}  // namespace flash::cuda
