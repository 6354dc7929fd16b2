#include "model/weight_loader.hpp"

#include <cstring>
#include <map>

#include "base/error.hpp"

namespace dflash {
namespace {

std::string shape_text(const int64_t * ne, size_t n) {
    std::string text = "[";
    for (size_t i = 0; i < n; ++i) {
        text += (i > 0 ? ", " : "") + std::to_string(ne[i]);
    }
    return text + "]";
}

} // namespace

WeightLoader::WeightLoader(std::shared_ptr<const GgufFile> file, std::shared_ptr<Device> device, size_t max_tensors,
                           bool pack)
    : file_(std::move(file)), device_(device), group_(std::make_unique<TensorGroup>(device, max_tensors)) {
    if (pack) {
        packed_ = std::make_unique<PackedWeights>(device, max_tensors);
    }
}

ggml_tensor * WeightLoader::declare(const std::string & name, std::initializer_list<int64_t> shape, bool load,
                                    Need need, Kind kind) {
    const GgufTensorInfo * info = file_->find_tensor(name);
    if (info == nullptr) {
        check(need == Need::optional, Status::format, "%s: tensor %s is missing", file_->path().c_str(), name.c_str());
        return nullptr;
    }
    bool same = true;
    for (size_t i = 0; i < 4; ++i) {
        const int64_t wanted = i < shape.size() ? *(shape.begin() + static_cast<std::ptrdiff_t>(i)) : 1;
        same = same && info->ne[i] == wanted;
    }
    check(same, Status::format, "%s: tensor %s is %s, want %s", file_->path().c_str(), name.c_str(),
          shape_text(info->ne, static_cast<size_t>(info->n_dims)).c_str(),
          shape_text(shape.begin(), shape.size()).c_str());
    check(kind != Kind::f32 || info->type == GGML_TYPE_F32, Status::unsupported, "%s: tensor %s has type %s, want f32",
          file_->path().c_str(), name.c_str(), ggml_type_name(info->type));
    if (!load) {
        return nullptr;
    }
    if (kind == Kind::factor) {
        if (ggml_tensor * copy = packed(name)) {
            return copy;
        }
    }
    ggml_tensor * tensor = group_->add(info->type, name, info->ne[0], info->ne[1], info->ne[2], info->ne[3]);
    wanted_.push_back({tensor, info});
    bytes_ += info->nbytes;
    return tensor;
}

ggml_tensor * WeightLoader::matrix(const std::string & name, std::initializer_list<int64_t> shape, bool load,
                                   Need need) {
    return declare(name, shape, load, need, Kind::any);
}

ggml_tensor * WeightLoader::factor(const std::string & name, std::initializer_list<int64_t> shape, bool load,
                                   Need need) {
    return declare(name, shape, load, need, Kind::factor);
}

ggml_tensor * WeightLoader::packed(const std::string & name) {
    const GgufTensorInfo * info = file_->find_tensor(name);
    ggml_tensor * tensor = packed_ == nullptr || info == nullptr || info->n_dims != 2
                               ? nullptr
                               : packed_->add(info->type, name, info->ne[0], info->ne[1]);
    if (tensor != nullptr) {
        wanted_packed_.push_back({tensor, info});
    }
    return tensor;
}

ggml_tensor * WeightLoader::f32(const std::string & name, std::initializer_list<int64_t> shape, bool load, Need need) {
    return declare(name, shape, load, need, Kind::f32);
}

ggml_tensor * WeightLoader::rows(ggml_tensor * matrix, int64_t begin, int64_t n, const std::string & name) {
    if (matrix == nullptr) {
        return nullptr;
    }
    ggml_tensor * view = ggml_view_2d(group_->ctx(), matrix, matrix->ne[0], n, matrix->nb[1],
                                      matrix->nb[1] * static_cast<size_t>(begin));
    ggml_set_name(view, name.c_str());
    views_.push_back(view);
    return view;
}

std::vector<float> WeightLoader::scales(const std::string & base, int64_t max_count) {
    for (const char * suffix : {".scale", ".weight.scale"}) {
        const GgufTensorInfo * info = file_->find_tensor(base + suffix);
        if (info == nullptr) {
            continue;
        }
        const int64_t n = info->ne[0] * info->ne[1] * info->ne[2] * info->ne[3];
        check(info->type == GGML_TYPE_F32 && (n == 1 || n == max_count), Status::format,
              "%s: tensor %s%s holds %lld values of %s, want 1%s of f32", file_->path().c_str(), base.c_str(), suffix,
              static_cast<long long>(n), ggml_type_name(info->type),
              max_count > 1 ? format(" or %lld", static_cast<long long>(max_count)).c_str() : "");
        std::vector<float> values(static_cast<size_t>(n));
        std::memcpy(values.data(), info->data, values.size() * sizeof(float));
        return values;
    }
    return {};
}

void WeightLoader::finish(const char * what, const std::function<bool(double)> & progress) {
    const auto report = [&](double fraction) {
        if (progress && !progress(fraction)) {
            throw Error(Status::cancelled, "loading was cancelled by the caller");
        }
    };
    report(0.0);
    if (device_->is_cpu()) {
        std::map<const MappedFile *, HostPlacement *> by_file;
        for (const Wanted & w : wanted_) {
            HostPlacement *& placement = by_file[w.info->file.get()];
            if (placement == nullptr) {
                placements_.push_back(
                    std::make_unique<HostPlacement>(device_, w.info->file->data(), w.info->file->size()));
                placement = placements_.back().get();
            }
            placement->place(w.tensor, w.info->data);
        }
        if (packed_ != nullptr) {
            packed_->allocate(what);
            for (size_t i = 0; i < wanted_packed_.size(); ++i) {
                PackedWeights::write(wanted_packed_[i].tensor, wanted_packed_[i].info->data);
                report(static_cast<double>(i + 1) / static_cast<double>(wanted_packed_.size()));
            }
            bytes_ += packed_->bytes();
        }
    } else {
        group_->allocate(what);
        const auto guard = device_->lock();
        uint64_t done = 0;
        constexpr uint64_t chunk = 64u << 20;
        for (const Wanted & w : wanted_) {
            for (uint64_t at = 0; at < w.info->nbytes; at += chunk) {
                const uint64_t n = std::min(chunk, w.info->nbytes - at);
                tensor_write(w.tensor, w.info->data + at, at, n);
                done += n;
                report(bytes_ > 0 ? static_cast<double>(done) / static_cast<double>(bytes_) : 1.0);
            }
        }
        ggml_backend_buffer_set_usage(group_->buffer(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    for (ggml_tensor * view : views_) {
        view_follow(view);
    }
    report(1.0);
}

} // namespace dflash
