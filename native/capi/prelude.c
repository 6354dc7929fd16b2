#include "dflash.h"
