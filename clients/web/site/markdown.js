import{b as a}from"./chunk-GZ7ZOARX.js";import"./chunk-NDWPSQUE.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
