#define SOCFLOWER_INT8_NAMESPACE portable
#include "loops.inc"
#include "block_portable.h"

namespace socflower::int8 {

extern const Path kPortablePath;
const Path kPortablePath =
    portable::make_path("portable", portable::kGeneral, portable::kGeneral, portable::kWide);

}  // namespace socflower::int8
